//! Block pool, prefix index and multi-group coordinator for the KV cache of large language models.
//!
//! A *group* is a list of layers that share one page geometry. A *lockstep set* is one or more groups that share one
//! row of block ids per request, so that groups which must stay aligned cannot drift apart. The [`Coordinator`] works
//! on sets; groups matter only where geometry does.
//!
//! Decisions live here, memory does not: the caller owns the tensors behind the block ids. Every type has a single
//! owner and takes `&mut self`; there are no threads, locks or callbacks. See [`audit`] for the invariants.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod audit;
pub mod coordinator;
pub mod error;
pub mod geometry;
mod groups;
pub mod hash;
pub mod ids;
pub mod offload;
pub mod pool;

pub use coordinator::{AllocateRequest, Coordinator, CoordinatorConfig, PrefixHit};
pub use error::{Error, Result};
pub use geometry::{GroupKind, GroupSpec, LayerSpec, Layout, LockstepSet, StateMode, StateSpec, plan_layout};
pub use hash::{hash_blocks, none_hash};
pub use ids::{BlockId, GroupId, SetId};
pub use offload::{OffloadIndex, StorePlan};
pub use pool::BlockPool;
