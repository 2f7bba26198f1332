//! Which sets are looked up together.

use super::CoordinatorConfig;
use crate::error::{Error, Result};
use crate::geometry::{GroupSpec, LockstepSet};
use crate::groups::Behaviour;
use crate::ids::GroupId;

/// Sets that are looked up together: a block is a hit only if all of them have it, and if one is read by a draft model,
/// all leave their last block.
#[derive(Clone, Debug)]
pub(super) struct LookupClass {
    /// Members, as indices of sets.
    pub(super) sets: Vec<u32>,
    pub(super) tokens_per_block: u64,
    pub(super) drops_last_block: bool,
    pub(super) behaviour: Behaviour,
}

/// Whether hits may end inside blocks: there are aligned states, whose blocks span more than a hash or stand beside sharded
/// ones, and every other group can have such hits or needs none.
pub(super) fn has_fine_grained_hits(
    config: &CoordinatorConfig,
    classes: &[LookupClass],
    hash_block_tokens: u64,
) -> bool {
    let asks = |class: &LookupClass| {
        let span = class.tokens_per_block;
        let wide = span > hash_block_tokens || (config.dcp_world_size > 1 && span == hash_block_tokens);
        matches!(class.behaviour, Behaviour::AlignedState(_)) && wide
    };
    let allows =
        |class: &LookupClass| class.behaviour.can_end_inside_a_block() || class.tokens_per_block == hash_block_tokens;
    config.groups.len() > 1 && classes.iter().any(asks) && classes.iter().all(allows)
}

/// The classes, and the class of each set. `found`: per set whether its blocks can be found.
pub(super) fn lookup_classes(
    config: &CoordinatorConfig,
    sets: &[LockstepSet],
    found: &[bool],
) -> Result<(Vec<LookupClass>, Vec<Option<usize>>)> {
    let group = |id: &GroupId| &config.groups[id.0 as usize];
    if let Some(numbers) = &config.lookup_classes
        && numbers.len() != config.groups.len()
    {
        let (numbers, groups) = (numbers.len(), config.groups.len());
        return Err(Error::config(format!("lookup_classes must hold one number per group: {groups}, got {numbers}")));
    }
    let all_marked = config.use_eagle && !config.groups.iter().any(|group| group.is_eagle);
    let mut classes: Vec<LookupClass> = Vec::new();
    let mut class_of_set = Vec::with_capacity(sets.len());
    for ((number, set), &found) in (0_u32..).zip(sets).zip(found) {
        if !found {
            class_of_set.push(None);
            continue;
        }
        let marked = all_marked || set.group_ids.iter().any(|id| group(id).is_eagle);
        let is_class_of = |class: &LookupClass| {
            let other = &sets[class.sets[0] as usize];
            let (own, first) = (set.group_ids[0], other.group_ids[0]);
            let same = match &config.lookup_classes {
                Some(numbers) => numbers[own.0 as usize] == numbers[first.0 as usize],
                None => set.tokens_per_block == other.tokens_per_block && is_same_geometry(group(&own), group(&first)),
            };
            same && !set.is_lockstep() && !other.is_lockstep()
        };
        let at = classes.iter().position(is_class_of).unwrap_or(classes.len());
        let behaviour = Behaviour::of(group(&set.group_ids[0]));
        let tokens_per_block = set.tokens_per_block;
        if let Some(class) = classes.get(at) {
            if class.behaviour != behaviour || class.tokens_per_block != tokens_per_block {
                let (first, other) = (sets[class.sets[0] as usize].group_ids[0], set.group_ids[0]);
                return Err(Error::config(format!(
                    "lookup_classes: groups {} and {} are of different kinds",
                    first.0, other.0
                )));
            }
        } else {
            classes.push(LookupClass { sets: Vec::new(), tokens_per_block, drops_last_block: false, behaviour });
        }
        classes[at].sets.push(number);
        classes[at].drops_last_block |= marked;
        class_of_set.push(Some(at));
    }
    let closed = |class: &LookupClass| class.behaviour.is_downward_closed();
    let mut order: Vec<usize> = (0..classes.len()).collect();
    order.sort_by_key(|&at| !closed(&classes[at]));
    let place_of = |class: usize| order.iter().position(|&at| at == class);
    let class_of_set = class_of_set.into_iter().map(|class| class.and_then(place_of)).collect();
    Ok((order.iter().map(|&at| classes[at].clone()).collect(), class_of_set))
}

/// Whether two groups cache the same kind of pages. As in vLLM the first layer stands for its group.
fn is_same_geometry(a: &GroupSpec, b: &GroupSpec) -> bool {
    let page = |group: &GroupSpec| group.layers.first().map(|layer| layer.page_bytes);
    a.kind == b.kind
        && a.block_size == b.block_size
        && a.sliding_window == b.sliding_window
        && a.extra_retained_tokens == b.extra_retained_tokens
        && a.attention_chunk_size == b.attention_chunk_size
        && a.state == b.state
        && page(a) == page(b)
}
