//! The bytes that Python's C pickler writes at protocol 5, for the few types that hash inputs are made of.
//!
//! Two of its habits matter beyond the opcodes. Strings, byte strings and tuples are numbered as they are written, and
//! one that comes again is written as its number. And the stream is cut into frames: a frame is closed before the first
//! value that finds it 64 KiB long, payloads of 64 KiB and more stand outside frames, and a frame of fewer than 4 bytes
//! loses its header.

use super::extra_key::{ExtraKeys, KeyId, Value};
use super::{BlockInput, Encoder};
use crate::error::Result;

/// A frame of at least this many bytes is closed before the next value; a payload of as many is left out of frames.
const FRAME_TARGET: usize = 64 * 1024;
/// A frame of fewer bytes has no header.
const FRAME_MIN: usize = 4;
/// The frame opcode and the length, 8 bytes.
const FRAME_HEADER: usize = 9;
/// Longest encoding of a 64-bit integer.
const MAX_INT: usize = 10;

const PROTOCOL: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const STOP: u8 = b'.';
const MARK: u8 = b'(';
const EMPTY_TUPLE: u8 = b')';
const TUPLES: [u8; 3] = [0x85, 0x86, 0x87];
const TUPLE: u8 = b't';
const MEMOIZE: u8 = 0x94;
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';
const NONE: u8 = b'N';
const TRUE: u8 = 0x88;
const FALSE: u8 = 0x89;
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const BININT: u8 = b'J';
const LONG1: u8 = 0x8a;
const LONG4: u8 = 0x8b;
const BINFLOAT: u8 = b'G';
const SHORT_BINBYTES: u8 = b'C';
const BINBYTES: u8 = b'B';
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';

/// A value's number in the input being written. Numbers of other inputs are recognised by their stamp, so that
/// nothing needs clearing between blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Memo {
    stamp: u32,
    number: u32,
}

/// Writes pickles into one buffer that is used again for each.
#[derive(Debug, Default)]
pub(super) struct Pickler {
    out: Vec<u8>,
    /// Where the open frame's header stands.
    frame: Option<usize>,
    memo: Vec<Memo>,
    stamp: u32,
    next_number: u32,
}

impl Encoder for Pickler {
    fn block(&mut self, input: &BlockInput<'_>) -> Result<&[u8]> {
        self.start(input.extra.map_or(0, |(keys, _)| keys.num_values()));
        let number = self.byte_string(SHORT_BINBYTES, BINBYTES, input.parent.as_bytes());
        if let (Some(_), Some(object)) = (input.extra, input.parent_object) {
            self.memo[object.index()] = Memo { stamp: self.stamp, number };
        }
        self.tokens(input.tokens);
        if let Some((keys, id)) = input.extra {
            self.save(keys, id);
        } else {
            self.boundary();
            self.write([NONE]);
        }
        self.write([TUPLES[2], MEMOIZE]);
        Ok(self.finish())
    }

    fn text(&mut self, text: &str) -> &[u8] {
        self.start(0);
        self.byte_string(SHORT_BINUNICODE, BINUNICODE, text.as_bytes());
        self.finish()
    }
}

impl Pickler {
    fn start(&mut self, num_values: usize) {
        self.out.clear();
        self.out.extend_from_slice(&PROTOCOL);
        self.frame = None;
        self.next_number = 0;
        if self.memo.len() < num_values {
            self.memo.resize(num_values, Memo::default());
        }
        self.stamp = self.stamp.wrapping_add(1);
        if self.stamp == 0 {
            self.memo.fill(Memo::default());
            self.stamp = 1;
        }
    }

    fn finish(&mut self) -> &[u8] {
        self.write([STOP]);
        self.close_frame();
        &self.out
    }

    /// Every value begins with this: a frame that is long enough ends here.
    fn boundary(&mut self) {
        if self.frame.is_some_and(|start| self.out.len() - start - FRAME_HEADER >= FRAME_TARGET) {
            self.close_frame();
        }
    }

    fn open_frame(&mut self) -> usize {
        *self.frame.get_or_insert_with(|| {
            let start = self.out.len();
            self.out.extend_from_slice(&[FRAME; FRAME_HEADER]);
            start
        })
    }

    fn close_frame(&mut self) {
        let Some(start) = self.frame.take() else { return };
        let content = start + FRAME_HEADER;
        let len = self.out.len() - content;
        if len < FRAME_MIN {
            self.out.drain(start..content);
        } else {
            self.out[start + 1..content].copy_from_slice(&(len as u64).to_le_bytes());
        }
    }

    /// Writes inside a frame, which is opened if need be.
    fn write<const N: usize>(&mut self, bytes: [u8; N]) {
        self.open_frame();
        self.out.extend_from_slice(&bytes);
    }

    fn memoize(&mut self) -> u32 {
        let number = self.next_number;
        self.next_number += 1;
        self.write([MEMOIZE]);
        number
    }

    /// A string or byte string and its number.
    fn byte_string(&mut self, short: u8, long: u8, payload: &[u8]) -> u32 {
        if payload.len() >= FRAME_TARGET {
            self.close_frame();
        } else {
            self.open_frame();
        }
        if let Ok(len) = u8::try_from(payload.len()) {
            self.out.extend_from_slice(&[short, len]);
        } else {
            self.out.push(long);
            self.out.extend_from_slice(&len32(payload));
        }
        self.out.extend_from_slice(payload);
        self.memoize()
    }

    /// The tuple of a block's tokens. No extra key can be this tuple, so its number is used but not kept.
    fn tokens(&mut self, tokens: &[i64]) {
        match tokens.len() {
            0 => return self.write([EMPTY_TUPLE]),
            1..=3 => {}
            _ => self.write([MARK]),
        }
        let mut rest = tokens;
        while !rest.is_empty() {
            self.boundary();
            let content = self.open_frame() + FRAME_HEADER;
            // As many as surely begin before the frame is long enough to end: they need no check of their own.
            let room = FRAME_TARGET - (self.out.len() - content);
            let (safe, later) = rest.split_at(rest.len().min(room.div_ceil(MAX_INT)));
            self.ints(safe);
            rest = later;
        }
        self.end_tuple(tokens.len());
        self.memoize();
    }

    fn end_tuple(&mut self, len: usize) {
        self.write([if len <= TUPLES.len() { TUPLES[len - 1] } else { TUPLE }]);
    }

    /// Integers, inside the open frame.
    fn ints(&mut self, values: &[i64]) {
        let mut end = self.out.len();
        // Room for the longest encodings is cut off again below; writing into a slice spares a check of the capacity.
        self.out.resize(end + values.len() * MAX_INT, 0);
        for value in values {
            end += put_int(&mut self.out[end..], *value);
        }
        self.out.truncate(end);
    }

    /// A value of the extra keys. Recursion is bounded by [`super::MAX_NESTING`].
    fn save(&mut self, keys: &ExtraKeys, id: KeyId) {
        self.boundary();
        let memo = self.memo[id.index()];
        if memo.stamp == self.stamp {
            let [a, b, c, d] = memo.number.to_le_bytes();
            return if memo.number <= 0xff { self.write([BINGET, a]) } else { self.write([LONG_BINGET, a, b, c, d]) };
        }
        let number = match keys.value(id) {
            Value::None => return self.write([NONE]),
            Value::Bool(value) => return self.write([if value { TRUE } else { FALSE }]),
            Value::Int(value) => {
                self.open_frame();
                return self.ints(&[value]);
            }
            Value::BigInt(digits) => {
                self.open_frame();
                if let Ok(len) = u8::try_from(digits.len()) {
                    self.out.extend_from_slice(&[LONG1, len]);
                } else {
                    self.out.push(LONG4);
                    self.out.extend_from_slice(&len32(digits));
                }
                return self.out.extend_from_slice(digits);
            }
            Value::Float(value) => {
                self.write([BINFLOAT]);
                return self.write(value.to_be_bytes());
            }
            Value::Str(text) => self.byte_string(SHORT_BINUNICODE, BINUNICODE, text),
            Value::Bytes(bytes) => self.byte_string(SHORT_BINBYTES, BINBYTES, bytes),
            Value::Tuple([]) => return self.write([EMPTY_TUPLE]),
            Value::Tuple(items) => {
                if items.len() > TUPLES.len() {
                    self.write([MARK]);
                }
                for item in items {
                    self.save(keys, *item);
                }
                self.end_tuple(items.len());
                self.memoize()
            }
        };
        self.memo[id.index()] = Memo { stamp: self.stamp, number };
    }
}

/// Writes an integer to the start of `out`, which has room for [`MAX_INT`] bytes. Returns how many it took.
#[inline]
fn put_int(out: &mut [u8], value: i64) -> usize {
    if let Ok(small) = i32::try_from(value) {
        // Without branches on the token's size: always 8 bytes, of which the next value overwrites the unused ones.
        let bits = small.cast_unsigned();
        let (two, four) = (bits > 0xff, bits > 0xffff);
        let opcode = if four {
            BININT
        } else if two {
            BININT2
        } else {
            BININT1
        };
        out[..8].copy_from_slice(&(u64::from(bits) << 8 | u64::from(opcode)).to_le_bytes());
        2 + usize::from(two) + 2 * usize::from(four)
    } else {
        // As many bytes as hold the value and its sign.
        let unused = if value < 0 { value.leading_ones() } else { value.leading_zeros() };
        let len = (64 - unused) as usize / 8 + 1;
        #[allow(clippy::cast_possible_truncation, reason = "at most 8")]
        out[..2].copy_from_slice(&[LONG1, len as u8]);
        out[2..10].copy_from_slice(&value.to_le_bytes());
        2 + len
    }
}

/// A length in 4 bytes. Values are at most [`super::MAX_VALUE_BYTES`] long, far less than that holds.
#[allow(clippy::cast_possible_truncation, reason = "see above")]
const fn len32(payload: &[u8]) -> [u8; 4] {
    (payload.len() as u32).to_le_bytes()
}
