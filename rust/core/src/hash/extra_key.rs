//! What a block is hashed with besides its tokens: adapter, images, salt and the like, as trees of plain values.
//!
//! Pickle writes an object that it has met before in the same input as a back-reference, so a hash depends on which
//! equal values are one object and which are not. Here one [`KeyId`] is one object: using an id twice says that the
//! same object stands in both places.

use super::BlockHash;
use crate::error::{Error, Result};

/// Tuples may be nested this deep. Python's own encoders give up at about a thousand.
pub const MAX_NESTING: u16 = 200;

/// Longest string, byte string or integer in bytes.
pub const MAX_VALUE_BYTES: usize = 1 << 26;

/// One value in an [`ExtraKeys`], and for a string, a byte string or a tuple its identity as an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(u32);

impl KeyId {
    /// The id as an index into a table with one slot per value.
    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A value as the encoders see it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// An integer that does not fit 64 bits: two's complement, little endian, without redundant sign bytes.
    BigInt(&'a [u8]),
    Float(f64),
    /// UTF-8.
    Str(&'a [u8]),
    Bytes(&'a [u8]),
    Tuple(&'a [KeyId]),
}

/// A part of one of the two backing lists.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    len: usize,
}

impl Span {
    fn of<T>(self, all: &[T]) -> &[T] {
        &all[self.start..self.start + self.len]
    }
}

#[derive(Clone, Copy, Debug)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    BigInt(Span),
    Float(f64),
    Str(Span),
    Bytes(Span),
    Tuple { items: Span, depth: u16 },
}

/// The extra keys of consecutive blocks. Values are added leaves first, then one entry is pushed per block.
#[derive(Clone, Debug, Default)]
pub struct ExtraKeys {
    nodes: Vec<Node>,
    bytes: Vec<u8>,
    items: Vec<KeyId>,
    blocks: Vec<Option<KeyId>>,
    parent: Option<KeyId>,
}

impl ExtraKeys {
    /// No values and no blocks.
    pub fn new() -> Self {
        Self::default()
    }

    fn add(&mut self, node: Node) -> Result<KeyId> {
        let id = u32::try_from(self.nodes.len())
            .map_err(|_| Error::config(format!("extra_keys: more than {} values", u32::MAX)))?;
        self.nodes.push(node);
        Ok(KeyId(id))
    }

    fn store(&mut self, bytes: &[u8]) -> Result<Span> {
        if bytes.len() > MAX_VALUE_BYTES {
            let len = bytes.len();
            return Err(Error::config(format!(
                "extra_keys: a value has {len} bytes, at most {MAX_VALUE_BYTES} are allowed"
            )));
        }
        let span = Span { start: self.bytes.len(), len: bytes.len() };
        self.bytes.extend_from_slice(bytes);
        Ok(span)
    }

    fn check(&self, id: KeyId) -> Result<Node> {
        self.nodes.get(id.index()).copied().ok_or_else(|| {
            Error::config(format!("extra_keys: value {} was not added, there are {}", id.0, self.nodes.len()))
        })
    }

    /// Python's `None` inside a tuple.
    ///
    /// # Errors
    /// [`Error::Config`] if there are 2**32 values already; the same holds for all `add_` functions.
    pub fn add_none(&mut self) -> Result<KeyId> {
        self.add(Node::None)
    }

    /// A truth value.
    ///
    /// # Errors
    /// As [`Self::add_none`].
    pub fn add_bool(&mut self, value: bool) -> Result<KeyId> {
        self.add(Node::Bool(value))
    }

    /// An integer of at most 64 bits.
    ///
    /// # Errors
    /// As [`Self::add_none`].
    pub fn add_int(&mut self, value: i64) -> Result<KeyId> {
        self.add(Node::Int(value))
    }

    /// An integer of any size: two's complement, little endian, with or without redundant sign bytes.
    ///
    /// # Errors
    /// As [`Self::add_none`], and if it is longer than [`MAX_VALUE_BYTES`].
    pub fn add_int_from_le_bytes(&mut self, bytes: &[u8]) -> Result<KeyId> {
        let mut digits = bytes;
        while let [head @ .., next, last] = digits
            && *last == if *next < 0x80 { 0x00 } else { 0xff }
        {
            digits = &digits[..=head.len()];
        }
        if digits.len() > 8 {
            let span = self.store(digits)?;
            return self.add(Node::BigInt(span));
        }
        let negative = digits.last().is_some_and(|last| *last >= 0x80);
        let mut word = [if negative { 0xff } else { 0x00 }; 8];
        word[..digits.len()].copy_from_slice(digits);
        self.add_int(i64::from_le_bytes(word))
    }

    /// A floating-point number.
    ///
    /// # Errors
    /// As [`Self::add_none`].
    pub fn add_float(&mut self, value: f64) -> Result<KeyId> {
        self.add(Node::Float(value))
    }

    /// A string that is an object of its own.
    ///
    /// # Errors
    /// As [`Self::add_none`], and if it is longer than [`MAX_VALUE_BYTES`].
    pub fn add_str(&mut self, value: &str) -> Result<KeyId> {
        let span = self.store(value.as_bytes())?;
        self.add(Node::Str(span))
    }

    /// A byte string that is an object of its own.
    ///
    /// # Errors
    /// As [`Self::add_none`], and if it is longer than [`MAX_VALUE_BYTES`].
    pub fn add_bytes(&mut self, value: &[u8]) -> Result<KeyId> {
        let span = self.store(value)?;
        self.add(Node::Bytes(span))
    }

    /// The byte string that is the parent of the first block, for keys that hold that very object.
    ///
    /// # Errors
    /// As [`Self::add_none`].
    pub fn add_parent(&mut self, parent: &BlockHash) -> Result<KeyId> {
        let id = self.add_bytes(parent.as_bytes())?;
        self.parent = Some(id);
        Ok(id)
    }

    /// A tuple of values added before, an object of its own.
    ///
    /// # Errors
    /// As [`Self::add_none`], if it nests deeper than [`MAX_NESTING`], or if an item was not added.
    pub fn add_tuple(&mut self, items: &[KeyId]) -> Result<KeyId> {
        let mut depth = 1;
        for item in items {
            if let Node::Tuple { depth: inner, .. } = self.check(*item)? {
                depth = depth.max(inner + 1);
            }
        }
        if depth > MAX_NESTING {
            return Err(Error::config(format!("extra_keys: tuples are nested deeper than {MAX_NESTING}")));
        }
        let span = Span { start: self.items.len(), len: items.len() };
        self.items.extend_from_slice(items);
        self.add(Node::Tuple { items: span, depth })
    }

    /// The next block's extra keys: a tuple, or nothing.
    ///
    /// # Errors
    /// [`Error::Config`] if the value was not added or is not a tuple.
    pub fn push_block(&mut self, keys: Option<KeyId>) -> Result<()> {
        if let Some(id) = keys
            && !matches!(self.check(id)?, Node::Tuple { .. })
        {
            return Err(Error::config(format!("extra_keys[{}] is not a tuple", self.blocks.len())));
        }
        self.blocks.push(keys);
        Ok(())
    }

    /// How many blocks have an entry.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn block(&self, at: usize) -> Option<KeyId> {
        self.blocks[at]
    }

    pub(super) fn parent(&self) -> Option<KeyId> {
        self.parent
    }

    /// Whether the keys may be hashed under this parent: what [`Self::add_parent`] was given, if anything, equals it.
    pub(super) fn parent_is(&self, parent: &BlockHash) -> bool {
        self.parent.is_none_or(|id| matches!(self.value(id), Value::Bytes(bytes) if bytes == parent.as_bytes()))
    }

    pub(super) fn num_values(&self) -> usize {
        self.nodes.len()
    }

    /// The value of an id that one of the `add_` functions has checked.
    pub(super) fn value(&self, id: KeyId) -> Value<'_> {
        match self.nodes[id.index()] {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(value),
            Node::Int(value) => Value::Int(value),
            Node::BigInt(span) => Value::BigInt(span.of(&self.bytes)),
            Node::Float(value) => Value::Float(value),
            Node::Str(span) => Value::Str(span.of(&self.bytes)),
            Node::Bytes(span) => Value::Bytes(span.of(&self.bytes)),
            Node::Tuple { items, .. } => Value::Tuple(items.of(&self.items)),
        }
    }
}
