//! Block hashes. Keys that Python's encoders would write in a way of their own are refused, never approximated.

use std::collections::HashMap;

use lockstep_kv_core::hash::{self as core, BlockHash, ExtraKeys, HashAlgo, KeyId, MAX_NESTING};
use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::args::{Given, bytes, items, text, uint, wrong_type};
use crate::errors::{config_error, raise};

/// Hash every full block of `token_ids`, each with the hash before it; byte-identical to vLLM's hashes.
///
/// `token_ids` is a sequence of ints that fit 64 bits with sign, or a one-dimensional integer array; `block_tokens` is
/// the number of tokens of a block. `algo` is "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor". `parent` is the hash of
/// the block before the first one, None = `none_hash`. `extra_keys` has one entry per full block, None or a tuple of
/// None, bool, int, float, str, bytes and tuples of these; which of them are one object matters to "sha256" and "xxhash".
///
/// Raises `ConfigError` for a value that cannot be used, `ArgumentTypeError` for one of a wrong type.
#[pyfunction]
#[pyo3(
    signature = (token_ids, block_tokens, *, algo=Given::NO, parent=None, extra_keys=None, none_hash),
    text_signature = "(token_ids, block_tokens, *, algo='sha256', parent=None, extra_keys=None, none_hash)"
)]
pub(crate) fn hash_blocks<'py>(
    py: Python<'py>,
    token_ids: &Bound<'py, PyAny>,
    block_tokens: &Bound<'py, PyAny>,
    algo: Given<'py>,
    parent: Option<&Bound<'py, PyAny>>,
    extra_keys: Option<&Bound<'py, PyAny>>,
    none_hash: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    let algo = algorithm(algo)?;
    let block_tokens = usize::try_from(uint(block_tokens, "block_tokens")?).unwrap_or(usize::MAX);
    let root = block_hash(none_hash, "none_hash")?;
    let (parent, parent_hash) = match parent {
        Some(parent) => (parent, block_hash(parent, "parent")?),
        None => (none_hash, root),
    };
    let tokens = tokens(token_ids)?;
    let extra = match extra_keys {
        Some(keys) => Some(KeyReader::new(parent, &parent_hash)?.read(keys)?),
        None => None,
    };
    let hashes = core::hash_blocks(algo, &tokens, block_tokens, parent_hash, extra.as_ref()).map_err(raise)?;
    PyList::new(py, hashes.iter().map(|hash| PyBytes::new(py, hash.as_bytes())))
}

/// The parent of a first block: the hash of the seed.
///
/// `seed` None means the environment's PYTHONHASHSEED; where that is not set, a fixed seed for "sha256" and
/// "sha256_cbor", and a new random one for "xxhash" and "xxhash_cbor". Raises `ConfigError` if `algo` is unknown.
#[pyfunction]
#[pyo3(signature = (algo=Given::NO, seed=None), text_signature = "(algo='sha256', seed=None)")]
pub(crate) fn none_hash<'py>(
    py: Python<'py>,
    algo: Given<'py>,
    seed: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let algo = algorithm(algo)?;
    let os = py.import("os")?;
    let environment = os.call_method1("getenv", ("PYTHONHASHSEED",))?;
    let hash = if let Some(seed) = seed {
        core::none_hash(algo, text(seed, "seed")?)
    } else if !environment.is_none() {
        core::none_hash(algo, text(&environment, "PYTHONHASHSEED")?)
    } else if let Some(seed) = algo.default_seed() {
        core::none_hash(algo, seed)
    } else {
        let random = os.call_method1("urandom", (32,))?.call_method0("hex")?;
        core::none_hash(algo, text(&random, "seed")?)
    };
    Ok(PyBytes::new(py, hash.map_err(raise)?.as_bytes()))
}

fn algorithm(algo: Given<'_>) -> PyResult<HashAlgo> {
    algo.value().map_or(Ok(HashAlgo::Sha256), |algo| HashAlgo::from_name(text(&algo, "algo")?).map_err(raise))
}

/// Bytes and no subclass, which pickle would write by its name.
fn block_hash(value: &Bound<'_, PyAny>, name: &str) -> PyResult<BlockHash> {
    if !value.is_exact_instance_of::<PyBytes>() {
        return Err(wrong_type(name, "bytes", value));
    }
    BlockHash::new(bytes(value, name)?).map_err(|error| config_error(format!("{name}: {error}")))
}

fn tokens(value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    const NAME: &str = "token_ids";
    if let Ok(list) = value.cast::<PyList>() {
        return collect_tokens(list.iter());
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return collect_tokens(tuple.iter());
    }
    if value.is_instance_of::<PyByteArray>() {
        return Err(wrong_type(NAME, "a sequence", value));
    }
    if let Some(tokens) = buffer(value)? {
        return Ok(tokens);
    }
    collect_tokens(items(value, NAME)?.into_iter())
}

fn collect_tokens<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>) -> PyResult<Vec<i64>> {
    // Collecting results would not reserve room, as it may stop early.
    let mut tokens = Vec::with_capacity(items.len());
    for (at, item) in items.enumerate() {
        tokens.push(token(&item, at)?);
    }
    Ok(tokens)
}

fn token(item: &Bound<'_, PyAny>, at: usize) -> PyResult<i64> {
    if item.is_exact_instance_of::<PyInt>() {
        return item.extract().map_err(|_| too_wide(item, at));
    }
    // Numbers of arrays, say. What they turn into is looked at, as a tensor has this method whatever it holds.
    match item.call_method0("__index__") {
        Ok(index) if !item.is_instance_of::<PyBool>() && !index.is_instance_of::<PyBool>() => {
            index.extract().map_err(|_| too_wide(&index, at))
        }
        Err(error) if !is_wrong_type(item.py(), &error) => Err(error),
        _ => Err(wrong_type(&format!("token_ids[{at}]"), "an int", item)),
    }
}

/// Whether an error says that a value is no int, and not that something else went wrong in it.
fn is_wrong_type(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyTypeError>(py) || error.is_instance_of::<PyAttributeError>(py)
}

fn too_wide(value: &Bound<'_, PyAny>, at: usize) -> PyErr {
    // Python refuses to write out the longest integers.
    let shown = value.str().map_or_else(|_| "a longer one".into(), |text| text.to_string());
    let shown: String = shown.chars().take(80).collect();
    config_error(format!("token_ids[{at}] must be between -2**63 and 2**63 - 1, got {shown}"))
}

/// The integers of a one-dimensional array, if it shows its memory. Other kinds of arrays are left to iteration.
fn buffer(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<i64>>> {
    if value.is_instance_of::<PyBytes>() {
        return Ok(None);
    }
    let Ok(buffer) = PyUntypedBuffer::get(value) else { return Ok(None) };
    if buffer.dimensions() != 1 {
        return Err(wrong_type("token_ids", "one-dimensional", value));
    }
    // Only plain native formats: a byte order that is spelt out may not be this machine's.
    if buffer.format().count_bytes() != 1 {
        return Ok(None);
    }
    let py = value.py();
    Ok(match buffer.item_size() {
        1 => copied::<i8>(py, &buffer)?.or(copied::<u8>(py, &buffer)?),
        2 => copied::<i16>(py, &buffer)?.or(copied::<u16>(py, &buffer)?),
        4 => copied::<i32>(py, &buffer)?.or(copied::<u32>(py, &buffer)?),
        // Unsigned 64-bit integers may not fit and go one by one.
        _ => copied::<i64>(py, &buffer)?,
    })
}

fn copied<T: Element + Into<i64>>(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Option<Vec<i64>>> {
    let Ok(typed) = buffer.as_typed::<T>() else { return Ok(None) };
    Ok(Some(typed.to_vec(py)?.into_iter().map(Into::into).collect()))
}

/// Follows the objects of the extra keys by address. All of them stay alive while this is in use.
struct KeyReader {
    extra: ExtraKeys,
    seen: HashMap<usize, KeyId>,
    /// Where the value being read stands: the block, then the place in each tuple around it.
    place: Vec<usize>,
}

impl KeyReader {
    fn new(parent: &Bound<'_, PyAny>, hash: &BlockHash) -> PyResult<Self> {
        let mut extra = ExtraKeys::new();
        let id = extra.add_parent(hash).map_err(raise)?;
        Ok(Self { extra, seen: HashMap::from([(address(parent), id)]), place: Vec::new() })
    }

    fn read(mut self, value: &Bound<'_, PyAny>) -> PyResult<ExtraKeys> {
        let entries = items(value, "extra_keys")?;
        for (at, entry) in entries.iter().enumerate() {
            self.place.push(at);
            let entry = if entry.is_none() {
                None
            } else if entry.is_exact_instance_of::<PyTuple>() {
                Some(self.add(entry)?)
            } else {
                return Err(wrong_type(&self.name(), "None or a tuple", entry));
            };
            self.place.pop();
            self.extra.push_block(entry).map_err(raise)?;
        }
        Ok(self.extra)
    }

    /// The name of the value being read.
    fn name(&self) -> String {
        self.place.iter().fold("extra_keys".into(), |name, at| format!("{name}[{at}]"))
    }

    /// Adds a value. Only the exact types are taken: pickle writes a subclass by its name, and knows None, bool, int and
    /// float by their value but everything else by its identity.
    fn add(&mut self, value: &Bound<'_, PyAny>) -> PyResult<KeyId> {
        let extra = &mut self.extra;
        if value.is_none() {
            return extra.add_none().map_err(raise);
        } else if value.is_exact_instance_of::<PyBool>() {
            return extra.add_bool(value.extract()?).map_err(raise);
        } else if value.is_exact_instance_of::<PyInt>() {
            return match value.extract() {
                Ok(small) => extra.add_int(small).map_err(raise),
                Err(_) => extra.add_int_from_le_bytes(&int_bytes(value)?).map_err(raise),
            };
        } else if value.is_exact_instance_of::<PyFloat>() {
            return extra.add_float(value.extract()?).map_err(raise);
        }
        if let Some(id) = self.seen.get(&address(value)) {
            return Ok(*id);
        }
        let id = if let Ok(string) = value.cast_exact::<PyString>() {
            let string = match string.to_str() {
                Ok(string) => string,
                Err(_) => text(value, &self.name())?,
            };
            self.extra.add_str(string)
        } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            self.extra.add_bytes(bytes.as_bytes())
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            let items = self.add_items(tuple)?;
            self.extra.add_tuple(&items)
        } else {
            let expected = "None, a bool, int, float, str, bytes or tuple and no subclass";
            return Err(wrong_type(&self.name(), expected, value));
        };
        let id = id.map_err(|error| config_error(format!("{}: {error}", self.name())))?;
        self.seen.insert(address(value), id);
        Ok(id)
    }

    fn add_items(&mut self, tuple: &Bound<'_, PyTuple>) -> PyResult<Vec<KeyId>> {
        if self.place.len() > usize::from(MAX_NESTING) {
            let block = self.place.first().copied().unwrap_or_default();
            return Err(config_error(format!("extra_keys[{block}]: tuples are nested deeper than {MAX_NESTING}")));
        }
        let mut ids = Vec::with_capacity(tuple.len());
        for (at, item) in tuple.iter().enumerate() {
            self.place.push(at);
            ids.push(self.add(&item)?);
            self.place.pop();
        }
        Ok(ids)
    }
}

/// Which object this is, among those alive.
fn address(value: &Bound<'_, PyAny>) -> usize {
    value.as_ptr() as usize
}

/// An int of any size in two's complement, little endian.
fn int_bytes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let bits: usize = value.call_method0("bit_length")?.extract()?;
    let kwargs = PyDict::new(value.py());
    kwargs.set_item("signed", true)?;
    value.call_method("to_bytes", (bits / 8 + 1, "little"), Some(&kwargs))?.extract()
}
