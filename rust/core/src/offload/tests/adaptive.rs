//! Scenarios of adaptive replacement, with all four lists after each step.

use super::{index, keys, plan, store};
use crate::error::Result;
use crate::offload::policy::Order;
use crate::offload::{OffloadIndex, Policy};

/// T1 and T2 of an adaptive order, oldest first, what is remembered of each, and the target.
fn adaptive(index: &OffloadIndex) -> String {
    let Order::Adaptive(order) = &index.order else { panic!("not adaptive") };
    order.show(|slot| index.slots.get(slot).key.as_bytes()[0])
}

#[test]
fn keys_used_again_outlive_a_scan() -> Result<()> {
    let mut index = index(4, Policy::Arc);
    store(&mut index, &[1, 2])?;
    index.touch(&keys(&[1, 2]));
    assert_eq!(adaptive(&index), "T1 [] T2 [2, 1] B1 [] B2 [] target 0");
    assert_eq!(store(&mut index, &[3, 4, 5, 6, 7, 8])?, [3, 4, 5, 6]);
    assert_eq!(adaptive(&index), "T1 [7, 8] T2 [2, 1] B1 [5, 6] B2 [] target 0", "|T1| + |B1| <= 4");
    index.prepare_load(&keys(&[7]))?;
    assert_eq!(adaptive(&index), "T1 [8] T2 [2, 1, 7] B1 [5, 6] B2 [] target 0");
    index.audit()
}

#[test]
fn ghosts_that_come_back_move_the_target() -> Result<()> {
    let mut index = index(4, Policy::Arc);
    store(&mut index, &[1, 2])?;
    index.touch(&keys(&[1, 2]));
    store(&mut index, &[3, 4, 5, 6])?;
    assert_eq!(adaptive(&index), "T1 [5, 6] T2 [2, 1] B1 [3, 4] B2 [] target 0");
    assert_eq!(store(&mut index, &[4])?, [5], "|T1| 2 > target 1");
    assert_eq!(adaptive(&index), "T1 [6] T2 [2, 1, 4] B1 [3, 5] B2 [] target 1");
    assert_eq!(store(&mut index, &[9])?, [2], "|T1| 1 = target");
    assert_eq!(adaptive(&index), "T1 [6, 9] T2 [1, 4] B1 [3, 5] B2 [2] target 1");
    assert_eq!(store(&mut index, &[3])?, [1], "the target is 2 now");
    assert_eq!(adaptive(&index), "T1 [6, 9] T2 [4, 3] B1 [5] B2 [2, 1] target 2");
    assert_eq!(store(&mut index, &[5])?, [4], "two ghosts of T2 to one of T1: a step of 2");
    assert_eq!(adaptive(&index), "T1 [6, 9] T2 [3, 5] B1 [] B2 [2, 1, 4] target 4");
    assert_eq!(store(&mut index, &[1])?, [3], "the target is 3 now, |T1| is 2");
    assert_eq!(adaptive(&index), "T1 [6, 9] T2 [5, 1] B1 [] B2 [2, 4, 3] target 3");
    assert_eq!(store(&mut index, &[2])?, [6], "|T1| equals the target, and the key was used again");
    assert_eq!(adaptive(&index), "T1 [9] T2 [5, 1, 2] B1 [6] B2 [4, 3] target 2");
    index.audit()
}

#[test]
fn a_ghost_whose_store_fails_is_forgotten() -> Result<()> {
    let mut index = index(2, Policy::Arc);
    store(&mut index, &[1, 2])?;
    index.touch(&keys(&[2]));
    store(&mut index, &[3])?;
    assert_eq!(adaptive(&index), "T1 [3] T2 [2] B1 [1] B2 [] target 0");
    index.prepare_store(&keys(&[1]));
    index.complete_store(&keys(&[1]), false)?;
    assert_eq!(adaptive(&index), "T1 [3] T2 [] B1 [] B2 [2] target 1");
    store(&mut index, &[1])?;
    assert_eq!(adaptive(&index), "T1 [3, 1] T2 [] B1 [] B2 [2] target 1", "1 is new again");
    index.audit()
}

#[test]
fn the_other_list_is_used_where_the_first_has_nothing_to_evict() -> Result<()> {
    let mut index = index(3, Policy::Arc);
    store(&mut index, &[1, 2, 3])?;
    index.touch(&keys(&[3]));
    assert_eq!(index.prepare_store(&keys(&[4, 1, 2])), Some(plan(&[4], &[2], &[3])));
    assert_eq!(adaptive(&index), "T1 [1, 2] T2 [] B1 [] B2 [3] target 0");
    index.audit()
}
