//! Scenes of the pool's life, and what its audit sees.

use super::*;

fn ids(numbers: &[u32]) -> Vec<BlockId> {
    numbers.iter().copied().map(BlockId).collect()
}

fn key(number: u8) -> Key {
    Key::new(&[number]).expect("in range")
}

fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(num_blocks, true).expect("valid")
}

#[test]
fn released_blocks_are_queued_as_vllm_queues_them() -> Result<()> {
    let mut pool = pool(9);
    assert_eq!(pool.take(6)?, ids(&[1, 2, 3, 4, 5, 6]));
    pool.publish(BlockId(2), key(2))?;
    pool.publish(BlockId(5), key(5))?;
    pool.release(&ids(&[6, 5, 4, 3, 2, 1]))?;
    assert_eq!(pool.free_order(), ids(&[6, 4, 3, 1, 7, 8, 5, 2]));
    pool.audit()
}

#[test]
fn taking_a_block_forgets_its_keys_and_touching_it_keeps_them() -> Result<()> {
    let mut pool = pool(3);
    pool.take(2)?;
    pool.publish(BlockId(1), key(1))?;
    pool.publish(BlockId(2), key(2))?;
    pool.release(&ids(&[1, 2]))?;
    pool.add_ref(&ids(&[2]))?;
    assert_eq!(pool.take(1)?, ids(&[1]));
    assert_eq!((pool.lookup(&key(1)), pool.lookup(&key(2))), (None, Some(BlockId(2))));
    assert_eq!(pool.take(1), Err(Error::PoolExhausted { requested: 1, free: 0 }));
    assert_eq!(pool.stats().evicted, 1);
    pool.audit()
}

#[test]
fn a_release_is_refused_whole() -> Result<()> {
    let mut pool = pool(5);
    pool.take(2)?;
    pool.add_ref(&ids(&[2]))?;
    let before = pool.state_digest();
    for bad in [&[2, 1, 1][..], &[2, 2, 2], &[1, 3], &[1, 0], &[2, 9]] {
        assert!(pool.release(&ids(bad)).is_err(), "{bad:?}");
        assert_eq!(pool.state_digest(), before, "{bad:?}");
    }
    let twice = pool.release(&ids(&[2, 2, 2])).expect_err("held twice");
    assert_eq!(twice, Error::DoubleFree { block: BlockId(2), asked: 3, held: 2, what: "references" });
    pool.release(&ids(&[2, 2]))?;
    assert_eq!(pool.num_free_blocks(), 3);
    pool.audit()
}

#[test]
fn eviction_leaves_references_alone() -> Result<()> {
    let mut pool = pool(4);
    pool.take(1)?;
    pool.publish(BlockId(1), key(1))?;
    pool.evict(&ids(&[1, 0]))?;
    assert_eq!(pool.lookup(&key(1)), None);
    assert_eq!(pool.ref_count(BlockId(1))?, 1);
    assert!(pool.evict(&ids(&[4])).is_err());
    pool.audit()
}

#[test]
fn reset_waits_for_all_references() -> Result<()> {
    let mut pool = pool(4);
    pool.take(1)?;
    pool.publish(BlockId(1), key(1))?;
    assert!(!pool.reset());
    assert_eq!(pool.lookup(&key(1)), Some(BlockId(1)));
    pool.release(&ids(&[1]))?;
    assert!(pool.reset());
    assert_eq!(pool.lookup(&key(1)), None);
    pool.audit()
}

#[test]
fn only_held_blocks_of_a_caching_pool_are_published() -> Result<()> {
    let mut pool = pool(4);
    assert!(pool.publish(BlockId(1), key(1)).is_err());
    let mut plain = BlockPool::new(4, false)?;
    plain.take(1)?;
    assert!(plain.publish(BlockId(1), key(1)).is_err());
    pool.audit()
}

#[test]
fn sizes_outside_the_range_are_refused() {
    assert!(BlockPool::new(0, true).is_err());
    assert!(BlockPool::new(MAX_BLOCKS + 1, true).is_err());
    assert_eq!(BlockPool::new(1, true).expect("the null block alone").num_free_blocks(), 0);
}

#[test]
fn audit_sees_wrong_counts() -> Result<()> {
    let mut broken = pool(4);
    broken.take(1)?;
    broken.refs[1] = 0;
    assert!(broken.audit().is_err());
    let mut broken = pool(4);
    broken.refs[2] = 1;
    assert!(broken.audit().is_err());
    let mut broken = pool(4);
    broken.refs[0] = 1;
    assert!(broken.audit().is_err());
    Ok(())
}
