//! Where groups matter: how many tokens a block spans, which groups share rows, and where pages lie in memory.

mod group_spec;
mod layout;
mod lockstep_set;

pub use group_spec::{GroupKind, GroupSpec, LayerSpec, StateMode, StateSpec};
pub use layout::{Layout, LayoutRequest, PageRegion, plan_layout};
pub use lockstep_set::{LockstepSet, form_sets};
