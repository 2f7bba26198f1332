//! Block hashes: each is the digest of its parent's hash, the block's tokens and its extra keys, so that it names the
//! whole prefix that ends with the block. The bytes are those of vLLM's algorithms of the same names.
//!
//! An algorithm is an encoding of the input and a digest of the encoding; there is one file per encoding.

mod block_hash;
mod cbor;
mod extra_key;
mod pickle;
#[cfg(test)]
mod tests;

pub use block_hash::{BlockHash, BlockHashes};
pub use extra_key::{ExtraKeys, KeyId, MAX_NESTING, MAX_VALUE_BYTES};

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use self::cbor::CborWriter;
use self::pickle::Pickler;
use crate::error::{Error, Result};

/// How a block is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashAlgo {
    /// SHA-256 of the pickle, 32 bytes.
    Sha256,
    /// SHA-256 of canonical CBOR, 32 bytes. The input does not depend on Python.
    Sha256Cbor,
    /// XXH3 (128 bits) of the pickle, 16 bytes, big endian. Not collision resistant.
    Xxhash,
    /// XXH3 (128 bits) of canonical CBOR, 16 bytes, big endian. Not collision resistant.
    XxhashCbor,
}

impl HashAlgo {
    /// All algorithms.
    pub const ALL: [Self; 4] = [Self::Sha256, Self::Sha256Cbor, Self::Xxhash, Self::XxhashCbor];

    /// The algorithm of this name.
    ///
    /// # Errors
    /// [`Error::Config`] if there is none.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|algo| algo.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::config(format!("algo must be one of {names}, got {name:?}"))
        })
    }

    /// The algorithm's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
            Self::Xxhash => "xxhash",
            Self::XxhashCbor => "xxhash_cbor",
        }
    }

    /// The seed of [`none_hash`] if none is given. Cryptographic algorithms do not depend on a secret, so all processes
    /// share one seed and with it their hashes. The others have none: a known seed would let colliding blocks be
    /// prepared, so each process must draw one, the hexadecimal form of 32 random bytes.
    pub const fn default_seed(self) -> Option<&'static str> {
        match self {
            Self::Sha256 | Self::Sha256Cbor => Some("vllm-none-hash"),
            Self::Xxhash | Self::XxhashCbor => None,
        }
    }
}

/// What one block's hash is made of.
#[derive(Clone, Copy, Debug)]
struct BlockInput<'a> {
    parent: BlockHash,
    /// The value among the extra keys that is the parent object itself.
    parent_object: Option<KeyId>,
    tokens: &'a [i64],
    extra: Option<(&'a ExtraKeys, KeyId)>,
}

/// Writes hash inputs into a buffer of its own.
trait Encoder: Default {
    /// The encoding of a block.
    fn block(&mut self, input: &BlockInput<'_>) -> Result<&[u8]>;

    /// The encoding of a string on its own.
    fn text(&mut self, text: &str) -> &[u8];
}

fn sha256(input: &[u8]) -> Result<BlockHash> {
    BlockHash::new(&Sha256::digest(input))
}

fn xxhash(input: &[u8]) -> Result<BlockHash> {
    BlockHash::new(&xxh3_128(input).to_be_bytes())
}

/// The hashes of all full blocks of `tokens`; tokens behind the last full block are left out. `parent` is the hash of
/// the block before the first one, or [`none_hash`] if there is none. `extra` has one entry per full block.
///
/// # Errors
/// [`Error::Config`] if `block_tokens` is 0, if `extra` has another number of entries or other parent bytes, or if one
/// block's input is too long to be encoded.
pub fn hash_blocks(
    algo: HashAlgo,
    tokens: &[i64],
    block_tokens: usize,
    parent: BlockHash,
    extra: Option<&ExtraKeys>,
) -> Result<Vec<BlockHash>> {
    if block_tokens == 0 {
        return Err(Error::config("block_tokens must be at least 1, got 0"));
    }
    let num_blocks = tokens.len() / block_tokens;
    if let Some(keys) = extra {
        if keys.num_blocks() != num_blocks {
            let given = keys.num_blocks();
            return Err(Error::config(format!(
                "extra_keys must have one entry per full block, {num_blocks} for {} tokens in blocks of {block_tokens}, \
                 got {given}",
                tokens.len()
            )));
        }
        if !keys.parent_is(&parent) {
            return Err(Error::config(format!("extra_keys were made for another parent than {parent:?}")));
        }
    }
    match algo {
        HashAlgo::Sha256 => chain::<Pickler>(tokens, block_tokens, parent, extra, sha256),
        HashAlgo::Sha256Cbor => chain::<CborWriter>(tokens, block_tokens, parent, extra, sha256),
        HashAlgo::Xxhash => chain::<Pickler>(tokens, block_tokens, parent, extra, xxhash),
        HashAlgo::XxhashCbor => chain::<CborWriter>(tokens, block_tokens, parent, extra, xxhash),
    }
}

fn chain<E: Encoder>(
    tokens: &[i64],
    block_tokens: usize,
    mut parent: BlockHash,
    extra: Option<&ExtraKeys>,
    digest: impl Fn(&[u8]) -> Result<BlockHash>,
) -> Result<Vec<BlockHash>> {
    let mut encoder = E::default();
    let mut parent_object = extra.and_then(ExtraKeys::parent);
    let mut hashes = Vec::with_capacity(tokens.len() / block_tokens);
    for (at, tokens) in tokens.chunks_exact(block_tokens).enumerate() {
        let extra = extra.and_then(|keys| keys.block(at).map(|id| (keys, id)));
        let input = BlockInput { parent, parent_object, tokens, extra };
        let bytes = encoder.block(&input).map_err(|error| Error::config(format!("extra_keys[{at}]: {error}")))?;
        parent = digest(bytes)?;
        parent_object = None;
        hashes.push(parent);
    }
    Ok(hashes)
}

/// The parent of a first block: the hash of the seed as a string. Where no seed is given, use
/// [`HashAlgo::default_seed`].
///
/// # Errors
/// [`Error::Config`] if the seed is longer than [`MAX_VALUE_BYTES`].
pub fn none_hash(algo: HashAlgo, seed: &str) -> Result<BlockHash> {
    if seed.len() > MAX_VALUE_BYTES {
        return Err(Error::config(format!("seed has {} bytes, at most {MAX_VALUE_BYTES} are allowed", seed.len())));
    }
    match algo {
        HashAlgo::Sha256 => sha256(Pickler::default().text(seed)),
        HashAlgo::Sha256Cbor => sha256(CborWriter::default().text(seed)),
        HashAlgo::Xxhash => xxhash(Pickler::default().text(seed)),
        HashAlgo::XxhashCbor => xxhash(CborWriter::default().text(seed)),
    }
}
