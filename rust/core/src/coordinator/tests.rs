//! Scenarios in which block managers are known to have gone wrong, with the right outcome.

use super::*;
use crate::geometry::{GroupKind, GroupSpec};

fn full(block_size: u32) -> GroupSpec {
    GroupSpec::new(GroupKind::Full, block_size, vec![])
}

fn coordinator(groups: Vec<GroupSpec>, num_blocks: u32) -> Coordinator {
    Coordinator::new(CoordinatorConfig::new(groups, num_blocks, 1 << 20)).expect("valid")
}

/// Hashes of the blocks of one sequence.
fn hashes(sequence: u8, count: u8) -> Vec<[u8; 32]> {
    (0..count).map(|at| [sequence.wrapping_mul(64) + at; 32]).collect()
}

/// Runs a whole request: look up, allocate, publish.
fn run(c: &mut Coordinator, name: &str, sequence: &[[u8; 32]], num_tokens: u64) -> bool {
    let hit = c.find_longest_hit(sequence, num_tokens - 1).expect("hashes");
    let ask = AllocateRequest { hit: Some(&hit), ..AllocateRequest::new(name, num_tokens) };
    let fits = c.allocate(&ask).expect("valid").is_some();
    if fits {
        c.cache(name, sequence, &Publication::new(num_tokens, None)).expect("valid");
    }
    fits
}

fn free_order(c: &Coordinator) -> Vec<u32> {
    c.pool().free_order().iter().map(|block| block.0).collect()
}

fn row(c: &Coordinator, name: &str, group: u32) -> Vec<u32> {
    c.block_ids(name, GroupId(group)).expect("known").iter().map(|block| block.0).collect()
}

#[test]
fn a_refused_request_does_not_hold_its_hits() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 6);
    let sequence = hashes(0, 5);
    assert!(run(&mut c, "first", &sequence, 20));
    c.free("first")?;
    assert_eq!(free_order(&c), [5, 4, 3, 2, 1]);
    assert!(run(&mut c, "other", &hashes(1, 3), 12));
    assert_eq!(row(&c, "other", 0), [5, 4, 3]);

    let before = c.state_digest();
    let hit = c.find_longest_hit(sequence.as_slice(), 19)?;
    assert_eq!(hit.num_tokens(), 8);
    let ask = AllocateRequest { hit: Some(&hit), ..AllocateRequest::new("third", 20) };
    for _ in 0..10 {
        assert!(c.allocate(&ask)?.is_none());
        assert_eq!(c.state_digest(), before);
    }
    assert_eq!(free_order(&c), [2, 1]);
    c.free("other")?;
    assert!(c.allocate(&ask)?.is_some());
    assert_eq!(row(&c, "third", 0)[..2], [1, 2]);
    Ok(())
}

#[test]
fn hits_that_nobody_holds_count_against_the_free_blocks() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 6);
    let sequence = hashes(0, 4);
    assert!(run(&mut c, "first", &sequence[..2], 8));
    c.free("first")?;
    assert!(run(&mut c, "other", &hashes(1, 2), 8));
    let hit = c.find_longest_hit(sequence.as_slice(), 15)?;
    let ask = AllocateRequest { hit: Some(&hit), ..AllocateRequest::new("third", 16) };
    assert!(c.allocate(&ask)?.is_none(), "2 idle hits and 2 new blocks, 3 free");

    let again = c.find_longest_hit(&sequence[..2], 8)?;
    let holder = AllocateRequest { hit: Some(&again), ..AllocateRequest::new("holder", 8) };
    assert!(c.allocate(&holder)?.is_some());
    c.free("other")?;
    assert!(c.allocate(&ask)?.is_some(), "the same hits, held by another request");
    Ok(())
}

#[test]
fn two_copies_of_a_prefix_are_both_kept() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 7);
    let sequence = hashes(0, 2);
    for name in ["a", "b"] {
        c.allocate(&AllocateRequest::new(name, 8))?;
    }
    for name in ["a", "b"] {
        c.cache(name, sequence.as_slice(), &Publication::new(8, None))?;
    }
    c.free("a")?;
    c.free("b")?;
    assert_eq!(free_order(&c), [5, 6, 2, 1, 4, 3]);
    c.allocate(&AllocateRequest::new("c", 16))?;
    let hit = c.find_longest_hit(sequence.as_slice(), 8)?;
    assert_eq!((hit.num_tokens(), hit.block_ids(GroupId(0))), (8, &[BlockId(3), BlockId(4)][..]));
    c.allocate(&AllocateRequest::new("d", 4))?;
    let hit = c.find_longest_hit(sequence.as_slice(), 8)?;
    assert_eq!((hit.num_tokens(), hit.block_ids(GroupId(0))), (4, &[BlockId(3)][..]));
    Ok(())
}

#[test]
fn an_evicted_prefix_is_not_hit_and_the_deepest_blocks_go_first() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 9);
    let (short, long) = (hashes(0, 6), hashes(1, 8));
    assert!(run(&mut c, "short", &short, 24));
    c.free("short")?;
    assert!(run(&mut c, "long", &long, 32));
    c.free("long")?;
    assert_eq!(c.find_longest_hit(short.as_slice(), 24)?.num_tokens(), 0);
    assert!(run(&mut c, "again", &short, 24));
    c.free("again")?;
    assert_eq!(c.find_longest_hit(short.as_slice(), 24)?.num_tokens(), 24);
    assert_eq!(c.find_longest_hit(long.as_slice(), 32)?.num_tokens(), 8);
    Ok(())
}

#[test]
fn all_groups_are_cut_to_the_shared_hit() -> Result<()> {
    let mut c = coordinator(vec![full(4), full(8)], 40);
    let sequence = hashes(0, 8);
    assert!(run(&mut c, "a", &sequence, 32));
    let second = row(&c, "a", 1);
    c.free("a")?;
    // The second group keeps its first block only, so both are cut to 8 tokens.
    c.evict(&[BlockId(second[1])])?;
    let hit = c.find_longest_hit(sequence.as_slice(), 32)?;
    assert_eq!(hit.num_tokens(), 8);
    assert_eq!([hit.block_ids(GroupId(0)).len(), hit.block_ids(GroupId(1)).len()], [2, 1]);
    Ok(())
}

#[test]
fn a_draft_model_drops_one_block_once() -> Result<()> {
    let draft = GroupSpec { is_eagle: true, ..full(4) };
    for (cached, expected) in [(36, 32), (32, 16)] {
        let mut config = CoordinatorConfig::new(vec![full(16), draft.clone()], 64, 1 << 20);
        config.use_eagle = true;
        let mut c = Coordinator::new(config)?;
        let sequence = hashes(0, 10);
        c.allocate(&AllocateRequest::new("a", 41))?;
        c.cache("a", sequence.as_slice(), &Publication::new(40, None))?;
        if cached == 32 {
            let ninth = row(&c, "a", 1)[8];
            c.evict(&[BlockId(ninth)])?;
        }
        let first = c.find_longest_hit(sequence.as_slice(), 40)?.num_tokens();
        let second = c.find_longest_hit(sequence.as_slice(), 40)?.num_tokens();
        assert_eq!([first, second], [expected; 2]);
    }
    Ok(())
}

#[test]
fn a_pinned_block_outlives_its_request() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 4);
    c.allocate(&AllocateRequest::new("a", 8))?;
    c.pin(&[BlockId(1), BlockId(2), BlockId(1)])?;
    c.free("a")?;
    assert_eq!(free_order(&c), [3]);
    assert!(c.allocate(&AllocateRequest::new("b", 8))?.is_none());
    let before = c.state_digest();
    let twice = c.unpin(&[BlockId(2), BlockId(1), BlockId(2)]).expect_err("pinned once");
    assert_eq!(twice, Error::DoubleFree { block: BlockId(2), asked: 2, held: 1, what: "pins" });
    assert_eq!(c.state_digest(), before);
    c.unpin(&[BlockId(1), BlockId(2), BlockId(1)])?;
    assert_eq!(c.pool().num_free_blocks(), 3);
    c.audit()
}

#[test]
fn audit_sees_references_that_nobody_holds() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 4);
    c.allocate(&AllocateRequest::new("a", 8))?;
    c.pool.add_ref(&[BlockId(1)])?;
    assert!(matches!(c.audit(), Err(Error::Invariant(_))));
    Ok(())
}

#[test]
fn a_reserve_that_is_not_there_refuses_even_what_needs_no_block() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 2);
    assert!(c.allocate(&AllocateRequest::new("running", 1))?.is_some());
    assert!(c.allocate(&AllocateRequest::new("running", 2))?.is_some());
    let ask = AllocateRequest { reserved_blocks: 1, ..AllocateRequest::new("running", 3) };
    assert!(c.allocate(&ask)?.is_none());
    Ok(())
}

#[test]
fn hashes_of_what_is_published_already_are_not_needed_again() -> Result<()> {
    let mut c = coordinator(vec![full(4)], 4);
    let sequence = hashes(0, 2);
    assert!(run(&mut c, "running", &sequence, 8));
    c.cache("running", &[] as &[[u8; 32]], &Publication::new(8, None))?;
    assert!(c.allocate(&AllocateRequest::new("running", 12))?.is_some());
    assert!(matches!(c.cache("running", sequence.as_slice(), &Publication::new(12, None)), Err(Error::Config(_))));
    Ok(())
}

#[test]
fn a_hit_can_only_be_made_on_blocks_of_its_own_set() -> Result<()> {
    let mut c = coordinator(vec![full(4), full(8)], 64);
    let sequence = hashes(0, 8);
    assert!(run(&mut c, "first", &sequence, 32));
    let (narrow, wide) = (c.block_ids("first", GroupId(0))?.to_vec(), c.block_ids("first", GroupId(1))?.to_vec());
    assert_eq!(c.hit_of(&[&narrow[..2], &wide[..1]], 8)?.num_tokens(), 8);
    for rows in [[&narrow[..2], &narrow[..1]], [&wide[..2], &wide[..1]], [&narrow[..1], &wide[..1]]] {
        assert!(matches!(c.hit_of(&rows, 8), Err(Error::Config(_))), "{rows:?}");
    }
    let twice = [narrow[0], narrow[0]];
    assert!(matches!(c.hit_of(&[&twice, &wide[..1]], 8), Err(Error::Config(_))));
    Ok(())
}

#[test]
fn the_audit_sees_a_block_in_rows_of_two_sets() -> Result<()> {
    let mut c = coordinator(vec![full(4), full(8)], 64);
    assert!(c.allocate(&AllocateRequest::new("first", 8))?.is_some());
    c.audit()?;
    let block = c.block_ids("first", GroupId(0))?[0];
    let other = c.block_ids("first", GroupId(1))?[0];
    c.requests.get_mut("first")?.rows[1].blocks[0] = block;
    c.pool.add_ref(&[block])?;
    c.pool.release(&[other])?;
    assert!(matches!(c.audit(), Err(Error::Invariant(text)) if text.starts_with("I2")));
    Ok(())
}

#[test]
fn an_earlier_end_of_a_prompt_does_not_hide_a_later_one() -> Result<()> {
    let config = CoordinatorConfig { hash_block_tokens: Some(4), ..CoordinatorConfig::new(vec![full(16)], 9, 64) };
    let mut c = Coordinator::new(config)?;
    assert!(c.allocate(&AllocateRequest::new("first", 30))?.is_some());
    c.cache("first", hashes(0, 8).as_slice(), &Publication::new(30, Some(30)))?;
    assert_eq!(c.findable_tokens("first")?, 28);
    c.cache("first", hashes(0, 8).as_slice(), &Publication::new(30, Some(10)))?;
    assert_eq!(c.findable_tokens("first")?, 28);
    Ok(())
}

#[test]
fn chunks_that_do_not_fit_their_blocks_are_refused() {
    let chunked =
        |chunk| GroupSpec { attention_chunk_size: Some(chunk), ..GroupSpec::new(GroupKind::ChunkedLocal, 8, vec![]) };
    let make =
        |groups, use_eagle| Coordinator::new(CoordinatorConfig { use_eagle, ..CoordinatorConfig::new(groups, 9, 64) });
    assert!(make(vec![full(8), chunked(16)], false).is_ok());
    assert!(make(vec![full(8), chunked(12)], false).is_err());
    assert!(make(vec![full(16), chunked(16)], false).is_err(), "blocks of two sizes");
    assert!(make(vec![full(8), chunked(16)], true).is_err(), "read by a draft model");
}

#[test]
fn a_window_gives_back_what_it_does_not_need() -> Result<()> {
    let window = GroupSpec { sliding_window: Some(5), ..GroupSpec::new(GroupKind::SlidingWindow, 4, vec![]) };
    let mut c = coordinator(vec![window], 9);
    assert!(run(&mut c, "first", &hashes(0, 5), 16));
    assert_eq!(row(&c, "first", 0), [1, 2, 3, 4]);
    c.release_skipped("first", 15, None)?;
    assert_eq!(row(&c, "first", 0), [0, 0, 3, 4]);
    c.release_skipped("first", 15, None)?;
    assert_eq!(free_order(&c), [5, 6, 7, 8, 2, 1]);
    // One more token: what is behind it goes first, and stays gone if the rest is refused.
    let ask = AllocateRequest { processed_tokens: 16, reserved_blocks: 9, ..AllocateRequest::new("first", 17) };
    assert!(c.allocate(&ask)?.is_none());
    assert_eq!(row(&c, "first", 0), [0, 0, 0, 4]);
    c.free("first")?;
    // A hit needs the block before its end, and nothing before that.
    let hit = c.find_longest_hit(hashes(0, 5).as_slice(), 19)?;
    assert_eq!((hit.num_tokens(), hit.block_ids(GroupId(0))), (16, &[0, 0, 0, 4].map(BlockId)[..]));
    Ok(())
}
