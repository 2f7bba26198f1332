//! One file per cache kind: what a request needs of it, what it may drop, and what a prefix hit requires.

pub(crate) mod full;

use crate::error::{Error, Result};
use crate::geometry::{GroupKind, GroupSpec};

/// Refuses groups of kinds that have no file here.
pub(crate) fn check_supported(groups: &[GroupSpec]) -> Result<()> {
    for (at, group) in groups.iter().enumerate() {
        if !matches!(group.kind, GroupKind::Full | GroupKind::Mla) {
            let kind = group.kind.name();
            return Err(Error::config(format!("group {at}: kind {kind:?} is not supported; supported: full, mla")));
        }
    }
    Ok(())
}
