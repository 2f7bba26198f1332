//! Which groups share one row of block ids.

use crate::error::{Error, Result};
use crate::geometry::{GroupKind, GroupSpec};
use crate::ids::GroupId;

/// One or more groups that share one row of block ids per request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockstepSet {
    /// The member groups, in ascending order.
    pub group_ids: Vec<GroupId>,
    /// Tokens one block id stands for, over all ranks; the same for every member.
    pub tokens_per_block: u64,
    /// For a set of one whose group holds its tokens on other shards than some MLA group does: why the two are not in
    /// lockstep. `None` everywhere else.
    pub why_separate: Option<String>,
}

impl LockstepSet {
    /// Whether the set has several members.
    pub fn is_lockstep(&self) -> bool {
        self.group_ids.len() > 1
    }
}

/// Partitions the groups into sets, in the order of each set's first group.
///
/// MLA groups of equal `tokens_per_block` form one set if there is more than one rank and they do not all have the
/// same number of shards. Every other group is a set of one.
///
/// # Errors
/// [`Error::Config`] if there is no group or a group's `kv_shards` does not divide `dcp_world_size`.
pub fn form_sets(groups: &[GroupSpec], dcp_world_size: u32) -> Result<Vec<LockstepSet>> {
    if groups.is_empty() {
        return Err(Error::config("groups must hold at least one group, got none"));
    }
    let mut shapes = Vec::with_capacity(groups.len());
    for (at, group) in groups.iter().enumerate() {
        shapes.push(Shape::of(group, dcp_world_size).map_err(|error| Error::config(format!("group {at}: {error}")))?);
    }

    let mut sets: Vec<LockstepSet> = Vec::new();
    for (group_id, shape) in (0_u32..).map(GroupId).zip(&shapes) {
        let moves_in_lockstep = shape.is_mla && has_mixed_shards(&shapes, shape.span);
        let peers = sets.iter_mut().find(|set| {
            let first = &shapes[set.group_ids[0].0 as usize];
            moves_in_lockstep && first.is_mla && first.span == shape.span
        });
        if let Some(set) = peers {
            set.group_ids.push(group_id);
        } else {
            let why_separate = if moves_in_lockstep { None } else { why_separate(group_id, &shapes) };
            sets.push(LockstepSet { group_ids: vec![group_id], tokens_per_block: shape.span, why_separate });
        }
    }
    Ok(sets)
}

/// What decides about lockstep.
struct Shape {
    is_mla: bool,
    shards: u32,
    span: u64,
}

impl Shape {
    fn of(group: &GroupSpec, dcp_world_size: u32) -> Result<Self> {
        group.validate()?;
        Ok(Self {
            is_mla: group.kind == GroupKind::Mla,
            shards: group.resolved_kv_shards(dcp_world_size)?,
            span: group.tokens_per_block(dcp_world_size)?,
        })
    }
}

/// Whether the MLA groups of this span do not all have the same number of shards.
fn has_mixed_shards(shapes: &[Shape], span: u64) -> bool {
    let mut shards = shapes.iter().filter(|shape| shape.is_mla && shape.span == span).map(|shape| shape.shards);
    let first = shards.next();
    shards.any(|count| Some(count) != first)
}

/// Why an MLA group that is alone in its set is not in lockstep with an MLA group of other shards, if there is one.
fn why_separate(group_id: GroupId, shapes: &[Shape]) -> Option<String> {
    let own = &shapes[group_id.0 as usize];
    let (peer_id, peer) =
        shapes.iter().enumerate().find(|(_, peer)| own.is_mla && peer.is_mla && peer.shards != own.shards)?;
    Some(format!(
        "group {} ({} shards) spans {} tokens per block, group {peer_id} ({} shards) spans {}; \
         lockstep needs equal spans",
        group_id.0, own.shards, own.span, peer.shards, peer.span
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mla(block_size: u32, shards: u32) -> GroupSpec {
        GroupSpec::new(GroupKind::Mla, block_size, vec![]).with_kv_shards(shards)
    }

    fn full(block_size: u32, shards: u32) -> GroupSpec {
        GroupSpec::new(GroupKind::Full, block_size, vec![]).with_kv_shards(shards)
    }

    fn members(groups: &[GroupSpec], dcp: u32) -> Vec<Vec<u32>> {
        let sets = form_sets(groups, dcp).expect("valid groups");
        sets.iter().map(|set| set.group_ids.iter().map(|group| group.0).collect()).collect()
    }

    #[test]
    fn replicated_and_partly_replicated_indexers_join_the_sharded_cache() {
        assert_eq!(members(&[mla(64, 4), mla(256, 1)], 4), [[0, 1]]);
        assert_eq!(members(&[mla(64, 8), mla(128, 4)], 8), [[0, 1]]);
        assert_eq!(members(&[mla(64, 8), mla(128, 4), mla(512, 1), mla(64, 8)], 8), [[0, 1, 2, 3]]);
    }

    #[test]
    fn other_mixes_stay_separate() {
        assert_eq!(members(&[mla(64, 1), mla(64, 1)], 1), [[0], [1]], "one rank");
        assert_eq!(members(&[mla(64, 4), mla(64, 4)], 4), [[0], [1]], "one number of shards");
        assert_eq!(members(&[mla(64, 4), mla(64, 1)], 4), [[0], [1]], "unequal spans");
        assert_eq!(members(&[mla(64, 4), full(256, 1)], 4), [[0], [1]], "not MLA");
    }

    #[test]
    fn a_third_group_does_not_break_a_pair() {
        assert_eq!(members(&[mla(64, 4), full(64, 4), mla(256, 1)], 4), vec![vec![0, 2], vec![1]]);
        assert_eq!(members(&[mla(64, 1), mla(64, 4), mla(256, 1)], 4), vec![vec![0], vec![1, 2]]);
    }

    #[test]
    fn separate_mixes_say_why() {
        let sets = form_sets(&[mla(64, 4), mla(64, 1)], 4).expect("valid groups");
        let why = sets[1].why_separate.as_deref().expect("a reason");
        assert!(why.contains("256") && why.contains("64") && why.contains("equal spans"), "{why}");
        for groups in [vec![mla(64, 4), mla(64, 4)], vec![mla(64, 4), mla(256, 1)], vec![full(64, 4)]] {
            let sets = form_sets(&groups, 4).expect("valid groups");
            assert!(sets.iter().all(|set| set.why_separate.is_none()));
        }
    }
}
