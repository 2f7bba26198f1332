//! Where every page lies: bytes per block, blocks in the budget, capacity, and one region per layer.
//!
//! Sets alias, members are disjoint. A block id belongs to one set at a time, so all sets start at byte 0; inside a set
//! every layer has bytes of its own.
//!
//! ```text
//! layer-outer (one set, or pages of one size):   | A: block 0 | block 1 | .. || B: block 0 | block 1 | .. |
//! block-outer (several sets, unequal pages):     | block 0: A | B | unused | block 1: A | B | unused | ..
//! ```
//! Several sets with unequal pages need the second form: in the first, block 3 of one set could overlap block 5 of
//! another.

use crate::error::{Error, Result};
use crate::geometry::{GroupSpec, LockstepSet, form_sets};
use crate::groups::{self, Behaviour};
use crate::ids::GroupId;

/// What a layout is planned for.
#[derive(Clone, Debug)]
pub struct LayoutRequest<'a> {
    /// The groups, in the order of the coordinator's configuration.
    pub groups: &'a [GroupSpec],
    /// Ranks in the decode-context-parallel group.
    pub dcp_world_size: u32,
    /// Bytes for the cache on one rank; as many blocks as fit are planned.
    pub available_bytes: Option<u64>,
    /// Number of blocks, the null block included. With `available_bytes` as well, the blocks must fit.
    pub num_blocks: Option<u64>,
    /// Longest request, in tokens.
    pub max_model_len: u64,
    /// Tokens of one request that are scheduled and whose results are not in yet, at most; `None` = `max_model_len`. What
    /// windows and chunks hold depends on it.
    pub max_in_flight_tokens: Option<u64>,
    /// Tokens of an encoder, at most. What cross attention holds depends on it.
    pub max_encoder_tokens: u64,
}

/// Where the pages of one layer lie in the backing allocation of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRegion {
    /// The layer's name.
    pub layer: String,
    /// The layer's group.
    pub group_id: GroupId,
    /// Byte offset of the page of block 0.
    pub offset: u64,
    /// Bytes of all pages of the layer.
    pub size: u64,
    /// Bytes of one page.
    pub page: u64,
    /// Bytes from one block's page to the next block's: `page` where the layer's pages are contiguous.
    pub block_stride: u64,
}

/// A planned layout of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The lockstep sets.
    pub sets: Vec<LockstepSet>,
    /// Blocks, the null block included.
    pub num_blocks: u64,
    /// Bytes one block id stands for on one rank: the largest set's sum of pages.
    pub bytes_per_block: u64,
    /// Blocks a request of `max_model_len` tokens holds, over all sets.
    pub blocks_per_request: u64,
    /// Longest request, in tokens.
    pub max_model_len: u64,
    /// One region per layer, in the order of groups and layers.
    pub regions: Vec<PageRegion>,
}

impl Layout {
    /// Bytes of the backing allocation of one rank.
    pub const fn total_bytes(&self) -> u64 {
        // Checked when the layout was planned.
        self.num_blocks * self.bytes_per_block
    }

    /// Requests of `max_model_len` tokens that fit at once. Like vLLM's figure it counts the null block.
    #[allow(clippy::cast_precision_loss, reason = "a report of requests, far below 2^53")]
    pub fn max_concurrency(&self) -> f64 {
        self.num_blocks as f64 / self.blocks_per_request as f64
    }

    /// Tokens that fit: `max_concurrency * max_model_len`, rounded down.
    pub fn capacity_tokens(&self) -> u64 {
        let tokens = u128::from(self.num_blocks) * u128::from(self.max_model_len) / u128::from(self.blocks_per_request);
        u64::try_from(tokens).unwrap_or(u64::MAX)
    }
}

/// Plans where the pages of all groups lie.
///
/// # Errors
/// [`Error::Config`] if a group is not valid or of a kind that is not supported, if layer names repeat, if neither a
/// budget nor a number of blocks is given, or if a request of `max_model_len` tokens does not fit.
pub fn plan_layout(request: &LayoutRequest<'_>) -> Result<Layout> {
    let sets = form_sets(request.groups, request.dcp_world_size)?;
    groups::check_supported(request.groups, request.dcp_world_size)?;
    check_layers(request.groups)?;
    if request.max_model_len == 0 {
        return Err(Error::config("max_model_len must be at least 1, got 0"));
    }

    let mut bytes_per_block = 0;
    let mut blocks_per_request = 0_u64;
    for set in &sets {
        bytes_per_block = bytes_per_block.max(set_bytes_per_block(set, request.groups)?);
        let span = set.tokens_per_block;
        let in_flight = request.max_in_flight_tokens.unwrap_or(request.max_model_len);
        let behaviour = Behaviour::of(&request.groups[set.group_ids[0].0 as usize]);
        if behaviour == Behaviour::Encoder && request.max_encoder_tokens == 0 {
            return Err(Error::config("a group of kind \"cross_attention\" needs max_encoder_tokens, got 0"));
        }
        let blocks = behaviour.planned_blocks(span, in_flight, request.max_model_len, request.max_encoder_tokens);
        blocks_per_request = blocks_per_request.checked_add(blocks).ok_or_else(|| {
            let (tokens, sum) = (request.max_model_len, u128::from(blocks_per_request) + u128::from(blocks));
            Error::config(format!("max_model_len {tokens} needs {sum} blocks, which overflow 64 bits"))
        })?;
    }

    let num_blocks = match (request.num_blocks, request.available_bytes) {
        (None, None) => return Err(Error::config("give available_bytes, num_blocks or both")),
        (None, Some(available)) => available / bytes_per_block,
        (Some(blocks), None) => blocks,
        (Some(blocks), Some(available)) if blocks <= available / bytes_per_block => blocks,
        (Some(blocks), Some(available)) => {
            return Err(Error::config(format!(
                "num_blocks {blocks} of {bytes_per_block} bytes do not fit in available_bytes {available}: \
                 {} fit",
                available / bytes_per_block
            )));
        }
    };
    if num_blocks.checked_mul(bytes_per_block).is_none() {
        return Err(Error::config(format!("num_blocks {num_blocks} of {bytes_per_block} bytes overflow 64 bits")));
    }
    // Block 0 is the null block, so one more than the request's own blocks is needed.
    if num_blocks <= blocks_per_request {
        return Err(Error::config(format!(
            "a request of max_model_len {} tokens needs {blocks_per_request} blocks of {bytes_per_block} bytes beside \
             the null block, but only {num_blocks} blocks fit in all; give at least {} bytes or lower max_model_len",
            request.max_model_len,
            (u128::from(blocks_per_request) + 1).saturating_mul(u128::from(bytes_per_block))
        )));
    }

    let regions = place(request.groups, &sets, num_blocks, bytes_per_block);
    let max_model_len = request.max_model_len;
    Ok(Layout { sets, num_blocks, bytes_per_block, blocks_per_request, max_model_len, regions })
}

/// Bytes of one block of all member groups on one rank.
fn set_bytes_per_block(set: &LockstepSet, groups: &[GroupSpec]) -> Result<u64> {
    let mut sum = 0_u64;
    for group in &set.group_ids {
        let bytes = groups[group.0 as usize].bytes_per_block()?;
        sum = sum.checked_add(bytes).ok_or_else(|| {
            Error::config(format!("the sum of page_bytes overflows: {sum} and {bytes} bytes do not fit in 64 bits"))
        })?;
    }
    Ok(sum)
}

/// Every group has layers, and no two layers have one name.
fn check_layers(groups: &[GroupSpec]) -> Result<()> {
    let mut seen = hashbrown::HashSet::new();
    for (at, group) in groups.iter().enumerate() {
        if group.layers.is_empty() {
            return Err(Error::config(format!("group {at}: layers is empty, so it has no pages to place")));
        }
        for layer in &group.layers {
            if !seen.insert(layer.name.as_str()) {
                return Err(Error::config(format!("group {at}: layer name {:?} occurs twice", layer.name)));
            }
        }
    }
    Ok(())
}

/// The regions of all layers, in the order of groups and layers.
fn place(groups: &[GroupSpec], sets: &[LockstepSet], num_blocks: u64, bytes_per_block: u64) -> Vec<PageRegion> {
    let mut pages = groups.iter().flat_map(|group| &group.layers).map(|layer| layer.page_bytes);
    let first_page = pages.next();
    let layer_outer = sets.len() == 1 || pages.all(|page| Some(page) == first_page);

    let mut regions: Vec<Vec<PageRegion>> = groups.iter().map(|_| Vec::new()).collect();
    for set in sets {
        let mut offset = 0;
        for &group_id in &set.group_ids {
            for layer in &groups[group_id.0 as usize].layers {
                let page = layer.page_bytes;
                let size = page * num_blocks;
                let block_stride = if layer_outer { page } else { bytes_per_block };
                let layer = layer.name.clone();
                regions[group_id.0 as usize].push(PageRegion { layer, group_id, offset, size, page, block_stride });
                offset += if layer_outer { size } else { page };
            }
        }
    }
    regions.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{GroupKind, LayerSpec};

    fn group(kind: GroupKind, block_size: u32, shards: u32, layers: u32, page: u64) -> GroupSpec {
        let layers = (0..layers).map(|at| LayerSpec { name: format!("{block_size}.{shards}.{at}"), page_bytes: page });
        GroupSpec::new(kind, block_size, layers.collect()).with_kv_shards(shards)
    }

    fn mla(block_size: u32, shards: u32, layers: u32, record: u64) -> GroupSpec {
        group(GroupKind::Mla, block_size, shards, layers, u64::from(block_size) * record)
    }

    fn plan(groups: &[GroupSpec], dcp: u32, blocks: Option<u64>, bytes: Option<u64>, len: u64) -> Result<Layout> {
        plan_layout(&LayoutRequest {
            groups,
            dcp_world_size: dcp,
            available_bytes: bytes,
            num_blocks: blocks,
            max_model_len: len,
            max_in_flight_tokens: None,
            max_encoder_tokens: 0,
        })
    }

    #[test]
    fn a_lockstep_pair_sums_bytes_and_not_blocks() -> Result<()> {
        let groups = [mla(64, 4, 3, 432), mla(256, 1, 2, 132)];
        let layout = plan(&groups, 4, None, Some(2 * 154_140_672), 262_144)?;
        assert_eq!(layout.bytes_per_block, 150_528);
        assert_eq!(layout.blocks_per_request, 1024);
        assert_eq!(layout.num_blocks, 2048);
        assert_eq!(layout.total_bytes(), 2 * 154_140_672);
        assert!((layout.max_concurrency() - 2.0).abs() < f64::EPSILON);
        assert_eq!(layout.capacity_tokens(), 2 * 262_144);
        Ok(())
    }

    #[test]
    fn inside_a_set_no_two_pages_share_a_byte() -> Result<()> {
        let layout = plan(&[mla(64, 4, 3, 432), mla(256, 1, 2, 132)], 4, Some(9), None, 1024)?;
        let mut end = 0;
        for region in &layout.regions {
            assert_eq!(region.offset, end);
            assert_eq!(region.block_stride, region.page);
            assert_eq!(region.size, region.page * 9);
            end = region.offset + region.size;
        }
        assert_eq!(end, layout.total_bytes());
        Ok(())
    }

    #[test]
    fn equal_pages_still_get_regions_of_their_own_inside_a_set() -> Result<()> {
        // 64 tokens of 256 bytes and 256 tokens of 64 bytes.
        let layout = plan(&[mla(64, 4, 1, 256), mla(256, 1, 1, 64)], 4, Some(3), None, 512)?;
        assert_eq!([layout.regions[0].offset, layout.regions[1].offset], [0, 3 * 16_384]);
        Ok(())
    }

    #[test]
    fn sets_of_unequal_pages_are_placed_block_by_block() -> Result<()> {
        let groups = [group(GroupKind::Full, 16, 1, 2, 100), group(GroupKind::Full, 32, 1, 3, 50)];
        let layout = plan(&groups, 1, Some(50), None, 64)?;
        assert_eq!(layout.bytes_per_block, 200);
        assert_eq!(layout.blocks_per_request, 4 + 2);
        let places: Vec<_> = layout.regions.iter().map(|region| (region.offset, region.block_stride)).collect();
        assert_eq!(places, [(0, 200), (100, 200), (0, 200), (50, 200), (100, 200)]);
        Ok(())
    }

    #[test]
    fn sets_of_equal_pages_alias_layer_by_layer() -> Result<()> {
        let groups = [group(GroupKind::Full, 16, 1, 2, 100), group(GroupKind::Full, 32, 1, 1, 100)];
        let layout = plan(&groups, 1, Some(50), None, 64)?;
        let places: Vec<_> = layout.regions.iter().map(|region| (region.offset, region.block_stride)).collect();
        assert_eq!(places, [(0, 100), (5000, 100), (0, 100)]);
        Ok(())
    }

    #[test]
    fn the_null_block_is_not_for_requests() {
        let groups = [group(GroupKind::Full, 4, 1, 1, 1)];
        assert!(plan(&groups, 1, Some(16), None, 64).is_err());
        assert!(plan(&groups, 1, Some(17), None, 64).is_ok());
    }

    #[test]
    fn bad_requests_are_refused() {
        let groups = [group(GroupKind::Full, 4, 1, 1, 1)];
        assert!(plan(&groups, 1, None, None, 64).is_err());
        assert!(plan(&groups, 1, Some(20), Some(19), 64).is_err());
        assert!(plan(&groups, 1, Some(17), None, 0).is_err());
        assert!(plan(&groups, 1, Some(u64::MAX), None, 64).is_ok());
        assert!(plan(&[group(GroupKind::Full, 4, 1, 1, 2)], 1, Some(u64::MAX), None, 64).is_err());
        assert!(plan(&[groups[0].clone(), groups[0].clone()], 1, Some(99), None, 64).is_err(), "names repeat");
        assert!(plan(&[group(GroupKind::Full, 4, 1, 0, 1)], 1, Some(99), None, 64).is_err(), "no layers");
    }
}
