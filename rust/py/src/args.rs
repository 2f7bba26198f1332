//! Translates Python arguments, refusing what does not fit with the argument's name and the value given.
//!
//! Arguments arrive as plain objects instead of through PyO3's own conversions, so that a wrong type or an integer
//! that does not fit raises this package's errors and is never truncated.

use std::convert::Infallible;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyList, PyString, PyTuple};

use crate::errors::{config_error, type_error};

/// An argument that has a default other than None: None given is a wrong type, not the default.
#[derive(Clone, Debug)]
pub(crate) struct Given<'py>(Option<Bound<'py, PyAny>>);

impl<'py> Given<'py> {
    /// Not given.
    pub(crate) const NO: Self = Self(None);

    /// The value, unless it is not given.
    pub(crate) fn value(self) -> Option<Bound<'py, PyAny>> {
        self.0
    }

    /// A bool, or the default if not given.
    pub(crate) fn flag(self, name: &str, default: bool) -> PyResult<bool> {
        self.0.as_ref().map_or(Ok(default), |value| flag(value, name))
    }

    /// A non-negative integer of at most 64 bits, or the default if not given.
    pub(crate) fn uint(self, name: &str, default: u64) -> PyResult<u64> {
        self.0.as_ref().map_or(Ok(default), |value| uint(value, name))
    }

    /// A non-negative integer of at most 32 bits, or the default if not given.
    pub(crate) fn uint32(self, name: &str, default: u32) -> PyResult<u32> {
        self.0.as_ref().map_or(Ok(default), |value| uint32(value, name))
    }
}

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = Infallible;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self(Some(value.to_owned())))
    }
}

/// At most this many characters of a value are repeated in an error message.
const SHOWN: usize = 80;

/// "an int, got str 'x'": the part of a message that shows a value.
fn shown(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map_or_else(|_| "object".into(), |name| name.to_string());
    let text = value.repr().map_or_else(|_| String::new(), |repr| repr.to_string());
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{kind} {}...", &text[..end]),
        None => format!("{kind} {text}"),
    }
}

/// A wrong type: "NAME must be EXPECTED, got TYPE VALUE".
pub(crate) fn wrong_type(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    type_error(format!("{name} must be {expected}, got {}", shown(value)))
}

/// A non-negative integer of at most 64 bits. Anything with `__index__` counts as one, except bool.
pub(crate) fn uint(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    if value.is_instance_of::<PyBool>() {
        return Err(wrong_type(name, "an int", value));
    }
    match value.extract::<u64>() {
        Ok(number) => Ok(number),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Err(config_error(format!("{name} must be between 0 and 2**64 - 1, got {}", shown(value))))
        }
        Err(error) if error.is_instance_of::<PyTypeError>(value.py()) => Err(wrong_type(name, "an int", value)),
        // What went wrong in the value's own code is not for us to rename.
        Err(error) => Err(error),
    }
}

/// A non-negative integer of at most 32 bits.
pub(crate) fn uint32(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u32> {
    let number = uint(value, name)?;
    u32::try_from(number).map_err(|_| config_error(format!("{name} must be between 0 and 2**32 - 1, got {number}")))
}

/// A bool, and nothing that is merely true or false.
pub(crate) fn flag(value: &Bound<'_, PyAny>, name: &str) -> PyResult<bool> {
    value.extract::<bool>().map_err(|_| wrong_type(name, "a bool", value))
}

/// A string that can be encoded as UTF-8.
pub(crate) fn text<'a>(value: &'a Bound<'_, PyAny>, name: &str) -> PyResult<&'a str> {
    let string = value.cast::<PyString>().map_err(|_| wrong_type(name, "a str", value))?;
    string.to_str().map_err(|_| config_error(format!("{name} is not valid Unicode: {}", shown(value))))
}

/// A bytes object.
pub(crate) fn bytes<'a>(value: &'a Bound<'_, PyAny>, name: &str) -> PyResult<&'a [u8]> {
    Ok(value.cast::<PyBytes>().map_err(|_| wrong_type(name, "bytes", value))?.as_bytes())
}

/// The items of a list, a tuple or another sequence that is neither text nor bytes.
pub(crate) fn items<'py>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(list.iter().collect());
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return Ok(tuple.iter().collect());
    }
    let is_text = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>();
    // A set has no order and no items by place; a mapping has keys.
    if is_text || !value.hasattr("__len__")? || !value.hasattr("__getitem__")? || value.hasattr("keys")? {
        return Err(wrong_type(name, "a sequence", value));
    }
    value.try_iter().map_err(|_| wrong_type(name, "a sequence", value))?.collect()
}

/// A bytes object inside a sequence, kept alive while its content is borrowed.
#[derive(Debug)]
pub(crate) struct BytesItem<'py>(Bound<'py, PyBytes>);

impl AsRef<[u8]> for BytesItem<'_> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// A sequence of bytes objects.
pub(crate) fn bytes_items<'py>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Vec<BytesItem<'py>>> {
    items(value, name)?
        .into_iter()
        .enumerate()
        .map(|(at, item)| match item.cast_into::<PyBytes>() {
            Ok(item) => Ok(BytesItem(item)),
            Err(error) => Err(wrong_type(&format!("{name}[{at}]"), "bytes", &error.into_inner())),
        })
        .collect()
}
