//! The Python exception for each core error, one to one.

use lockstep_kv_core::Error;
use pyo3::PyErr;

mod classes {
    pyo3::import_exception!(lockstep_kv.errors, ArgumentTypeError);
    pyo3::import_exception!(lockstep_kv.errors, ConfigError);
    pyo3::import_exception!(lockstep_kv.errors, DoubleFreeError);
    pyo3::import_exception!(lockstep_kv.errors, InvariantError);
    pyo3::import_exception!(lockstep_kv.errors, PoolExhaustedError);
    pyo3::import_exception!(lockstep_kv.errors, StaleHitError);
    pyo3::import_exception!(lockstep_kv.errors, UnknownRequestError);
}

/// The exception for a core error.
#[allow(clippy::needless_pass_by_value, reason = "the shape that map_err needs")]
pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Config(_) => classes::ConfigError::new_err(message),
        Error::PoolExhausted { .. } => classes::PoolExhaustedError::new_err(message),
        Error::StaleHit { .. } => classes::StaleHitError::new_err(message),
        Error::UnknownRequest(_) => classes::UnknownRequestError::new_err(message),
        Error::DoubleFree { .. } | Error::DoubleComplete { .. } => classes::DoubleFreeError::new_err(message),
        Error::Invariant(_) => classes::InvariantError::new_err(message),
    }
}

/// A `ConfigError` with this message.
pub(crate) fn config_error(message: String) -> PyErr {
    classes::ConfigError::new_err(message)
}

/// An `ArgumentTypeError` with this message.
pub(crate) fn type_error(message: String) -> PyErr {
    classes::ArgumentTypeError::new_err(message)
}
