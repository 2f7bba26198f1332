//! Scenarios of the index, one per rule.

mod adaptive;

use super::policy::Order;
use super::slots::State;
use super::{Lookup, MAX_SLOTS, OffloadIndex, Policy, StorePlan};
use crate::error::{Error, Result};
use crate::pool::Key;

fn key(number: u8) -> Key {
    Key::new(&[number; 32]).expect("in range")
}

fn keys(numbers: &[u8]) -> Vec<Key> {
    numbers.iter().copied().map(key).collect()
}

fn index(num_slots: u32, policy: Policy) -> OffloadIndex {
    OffloadIndex::new(num_slots, policy).expect("valid")
}

fn lru(num_slots: u32) -> OffloadIndex {
    index(num_slots, Policy::Lru)
}

fn plan(stored: &[u8], slots: &[u32], evicted: &[u8]) -> StorePlan {
    StorePlan { keys: keys(stored), slots: slots.to_vec(), evicted: keys(evicted) }
}

/// Stores keys one after the other; gives those evicted.
fn store(index: &mut OffloadIndex, numbers: &[u8]) -> Result<Vec<u8>> {
    let mut evicted = Vec::new();
    for &number in numbers {
        let plan = index.prepare_store(&keys(&[number])).expect("room");
        evicted.extend(plan.evicted.iter().map(|key| key.as_bytes()[0]));
        index.complete_store(&keys(&[number]), true)?;
        index.audit()?;
    }
    Ok(evicted)
}

fn found(index: &OffloadIndex, numbers: &[u8]) -> String {
    let letter = |number: &u8| match index.lookup(&key(*number)) {
        Lookup::Miss => '-',
        Lookup::Pending => 'p',
        Lookup::Hit => 'h',
    };
    numbers.iter().map(letter).collect()
}

/// A call that must be refused and change nothing.
fn refused<T: std::fmt::Debug>(index: &mut OffloadIndex, call: impl FnOnce(&mut OffloadIndex) -> Result<T>) -> Error {
    let (digest, stats) = (index.state_digest(), index.stats());
    let error = call(index).expect_err("refused");
    assert_eq!((index.state_digest(), index.stats()), (digest, stats), "{error}");
    index.audit().expect("sound");
    error
}

fn double(number: u8, asked: usize, held: usize, what: &'static str) -> Error {
    Error::DoubleComplete { key: format!("{number:02x}").repeat(32), asked, held, what }
}

#[test]
fn sizes_outside_the_range_are_refused() {
    assert!(OffloadIndex::new(0, Policy::Lru).is_err());
    assert!(OffloadIndex::new(MAX_SLOTS + 1, Policy::Arc).is_err());
    assert_eq!((lru(1).num_slots(), lru(1).num_free_slots(), lru(1).policy()), (1, 1, Policy::Lru));
    assert_eq!(index(1, Policy::Arc).policy(), Policy::Arc);
}

#[test]
fn a_store_makes_a_key_pending_and_then_a_hit() -> Result<()> {
    let mut index = lru(4);
    assert_eq!(index.prepare_store(&keys(&[7, 8, 7])), Some(plan(&[7, 8], &[0, 1], &[])));
    assert_eq!((found(&index, &[7, 8, 9]), index.num_free_slots(), index.num_keys()), ("pp-".into(), 2, 2));
    assert_eq!(index.prepare_store(&keys(&[8, 9, 7])), Some(plan(&[9], &[2], &[])));
    index.complete_store(&keys(&[8]), true)?;
    assert_eq!(found(&index, &[7, 8, 9]), "php");
    assert_eq!(index.prepare_store(&keys(&[7, 8, 9])), Some(StorePlan::default()), "all present");
    assert_eq!(index.prepare_store(&[]), Some(StorePlan::default()));
    let stats = index.stats();
    assert_eq!((stats.stored, stats.free_slots, stats.writing_slots, stats.idle_slots), (1, 1, 2, 1));
    index.audit()
}

#[test]
fn a_failed_store_is_forgotten_and_its_slot_is_free() -> Result<()> {
    let mut index = lru(3);
    index.prepare_store(&keys(&[1, 2]));
    index.complete_store(&keys(&[1, 2]), false)?;
    assert_eq!((found(&index, &[1, 2]), index.num_free_slots(), index.stats().failed_stores), ("--".into(), 3, 2));
    assert_eq!(index.prepare_store(&keys(&[3, 4])), Some(plan(&[3, 4], &[0, 1], &[])));
    index.audit()
}

#[test]
fn completing_what_is_not_in_flight_is_refused_whole() -> Result<()> {
    let mut index = lru(4);
    index.prepare_store(&keys(&[1, 2]));
    for success in [true, false] {
        let error = refused(&mut index, |index| index.complete_store(&keys(&[1, 9]), success));
        assert_eq!(error, double(9, 1, 0, "stores"), "unknown");
        let error = refused(&mut index, |index| index.complete_store(&keys(&[1, 2, 1]), success));
        assert_eq!(error, double(1, 2, 1, "stores"), "twice");
    }
    index.complete_store(&keys(&[1]), true)?;
    let error = refused(&mut index, |index| index.complete_store(&keys(&[2, 1]), true));
    assert_eq!(error, double(1, 1, 0, "stores"), "completed already");
    assert!(error.to_string().contains(&"01".repeat(32)), "{error}");
    Ok(())
}

#[test]
fn loads_pin_and_are_given_back_one_by_one() -> Result<()> {
    let mut index = lru(2);
    store(&mut index, &[1, 2])?;
    assert_eq!(index.prepare_load(&keys(&[2, 1, 2]))?, [1, 0, 1]);
    assert_eq!((index.stats().reading_slots, index.stats().loads), (2, 3));
    assert_eq!(found(&index, &[1, 2]), "hh", "reading is ready");
    index.complete_load(&keys(&[2]))?;
    assert_eq!(index.stats().reading_slots, 2);
    let error = refused(&mut index, |index| index.complete_load(&keys(&[1, 2, 2])));
    assert_eq!(error, double(2, 2, 1, "loads"));
    index.complete_load(&keys(&[1, 2]))?;
    assert_eq!(index.stats().idle_slots, 2);
    for number in [1, 9] {
        let error = refused(&mut index, |index| index.complete_load(&keys(&[number])));
        assert_eq!(error, double(number, 1, 0, "loads"));
    }
    Ok(())
}

#[test]
fn only_ready_keys_are_loaded() -> Result<()> {
    let mut index = lru(4);
    store(&mut index, &[1])?;
    index.prepare_store(&keys(&[2]));
    for (number, state) in [(2, "is being written"), (3, "is not stored")] {
        let Error::Config(text) = refused(&mut index, |index| index.prepare_load(&keys(&[1, number]))) else {
            panic!("another kind of error");
        };
        assert!(text.contains(state) && text.contains(&format!("{number:02x}").repeat(32)), "{text}");
    }
    Ok(())
}

#[test]
fn loads_are_never_counted_beyond_what_can_be() -> Result<()> {
    let mut index = lru(1);
    store(&mut index, &[1])?;
    index.slots.set(0, State::Ready { reads: u32::MAX - 1 });
    assert!(matches!(refused(&mut index, |index| index.prepare_load(&keys(&[1, 1]))), Error::Config(_)));
    index.prepare_load(&keys(&[1])).map(drop)
}

#[test]
fn free_slots_are_used_before_anything_is_evicted() -> Result<()> {
    let mut index = lru(3);
    store(&mut index, &[1, 2])?;
    assert_eq!(index.prepare_store(&keys(&[3, 4])), Some(plan(&[3, 4], &[2, 0], &[1])));
    assert_eq!((found(&index, &[1, 2, 3, 4]), index.stats().evicted), ("-hpp".into(), 1));
    index.audit()
}

#[test]
fn the_least_recently_used_key_goes_first() -> Result<()> {
    let mut index = lru(4);
    index.prepare_store(&keys(&[1, 2, 3, 4]));
    index.complete_store(&keys(&[1, 2, 3, 4]), true)?;
    assert_eq!(store(&mut index.clone(), &[5, 6, 7, 8])?, [4, 3, 2, 1], "the end of a prefix goes first");
    index.touch(&keys(&[3, 9, 4]));
    assert_eq!(store(&mut index.clone(), &[5, 6, 7, 8])?, [2, 1, 4, 3]);
    index.prepare_load(&keys(&[2, 4]))?;
    index.complete_load(&keys(&[2, 4]))?;
    assert_eq!(store(&mut index.clone(), &[5, 6, 7, 8])?, [1, 3, 4, 2]);
    index.lookup(&key(1));
    index.prepare_store(&keys(&[1, 3]));
    assert_eq!(store(&mut index, &[5])?, [1], "neither is a use");
    Ok(())
}

#[test]
fn what_is_written_or_read_or_given_is_not_evicted() -> Result<()> {
    for policy in [Policy::Lru, Policy::Arc] {
        let mut index = index(4, policy);
        store(&mut index, &[1, 2, 3])?;
        index.prepare_store(&keys(&[4]));
        index.prepare_load(&keys(&[1]))?;
        assert_eq!(index.prepare_store(&keys(&[5, 2, 2, 1])), Some(plan(&[5], &[2], &[3])), "{policy:?}");
        let digest = index.state_digest();
        assert_eq!(index.prepare_store(&keys(&[6, 7])), None, "{policy:?}: only 2 can go");
        assert_eq!(index.prepare_store(&keys(&[6, 2])), None, "{policy:?}: 2 is given");
        assert_eq!(index.prepare_store(&keys(&[6, 7, 8, 9, 10])), None, "{policy:?}: more than there are slots");
        assert_eq!(index.state_digest(), digest);
        assert_eq!(index.prepare_store(&keys(&[6])), Some(plan(&[6], &[1], &[2])), "{policy:?}");
        index.audit()?;
    }
    Ok(())
}

#[test]
fn reset_forgets_keys_and_keeps_slots_in_transfer() -> Result<()> {
    let mut index = lru(4);
    store(&mut index, &[1, 2])?;
    index.prepare_store(&keys(&[3]));
    index.prepare_load(&keys(&[2, 2]))?;
    index.reset();
    index.audit()?;
    assert_eq!((found(&index, &[1, 2, 3]), index.num_free_slots(), index.num_keys()), ("---".into(), 2, 0));
    assert_eq!(index.stats().draining_slots, 2);
    assert!(matches!(refused(&mut index, |index| index.prepare_load(&keys(&[2]))), Error::Config(_)));
    assert_eq!(index.prepare_store(&keys(&[4, 5, 6])), None, "draining slots are not given away");
    assert_eq!(index.prepare_store(&keys(&[4, 5])), Some(plan(&[4, 5], &[0, 3], &[])));
    index.complete_load(&keys(&[2]))?;
    assert_eq!(index.num_free_slots(), 0, "one load is left");
    index.complete_load(&keys(&[2]))?;
    index.complete_store(&keys(&[3]), true)?;
    assert_eq!((found(&index, &[2, 3]), index.num_free_slots()), ("--".into(), 2));
    assert_eq!((index.stats().dropped_stores, index.stats().stored), (1, 2));
    index.audit()
}

#[test]
fn completions_count_for_the_oldest_transfer_of_a_key() -> Result<()> {
    let mut index = lru(6);
    for slot in 0..3 {
        assert_eq!(index.prepare_store(&keys(&[1])), Some(plan(&[1], &[slot], &[])));
        if slot < 2 {
            index.reset();
        }
        index.audit()?;
    }
    let error = refused(&mut index, |index| index.complete_store(&keys(&[1, 1]), true));
    assert!(matches!(error, Error::Config(_)), "once per call, however many are in flight");
    index.complete_store(&keys(&[1]), true)?;
    index.complete_store(&keys(&[1]), false)?;
    assert_eq!(found(&index, &[1]), "p");
    index.complete_store(&keys(&[1]), true)?;
    assert_eq!(index.prepare_load(&keys(&[1]))?, [2]);

    index.reset();
    assert_eq!(store(&mut index, &[1])?, [0; 0]);
    assert_eq!(index.prepare_load(&keys(&[1]))?, [0]);
    assert_eq!((index.stats().draining_slots, index.stats().reading_slots), (1, 1));
    assert_eq!(refused(&mut index, |index| index.complete_load(&keys(&[1, 1, 1]))), double(1, 3, 2, "loads"));
    for (reading, idle) in [(1, 0), (0, 1)] {
        index.complete_load(&keys(&[1]))?;
        let stats = index.stats();
        assert_eq!((stats.draining_slots, stats.reading_slots, stats.idle_slots), (0, reading, idle));
    }
    index.audit()
}

#[test]
fn an_index_that_was_reset_at_rest_is_as_new() -> Result<()> {
    for policy in [Policy::Lru, Policy::Arc] {
        let mut index = index(3, policy);
        let new = index.state_digest();
        store(&mut index, &[1, 2, 3, 4, 5])?;
        index.touch(&keys(&[5]));
        store(&mut index, &[1])?;
        assert_ne!(index.state_digest(), new);
        index.reset();
        assert_eq!(index.state_digest(), new, "{policy:?}");
        index.audit()?;
    }
    Ok(())
}

#[test]
fn the_digest_sees_every_change() -> Result<()> {
    type Call = fn(&mut OffloadIndex) -> Result<()>;
    let calls: [Call; 9] = [
        |index| index.prepare_store(&keys(&[1, 2, 3])).map(drop).ok_or_else(|| Error::config("no room")),
        |index| index.complete_store(&keys(&[3]), false),
        |index| index.complete_store(&keys(&[1, 2]), true),
        |index| index.prepare_load(&keys(&[1, 1])).map(drop),
        |index| index.complete_load(&keys(&[1])),
        |index| index.prepare_store(&keys(&[3, 4])).map(drop).ok_or_else(|| Error::config("no room")),
        |index| {
            index.reset();
            Ok(())
        },
        |index| index.complete_store(&keys(&[4]), true),
        |index| index.complete_load(&keys(&[1])),
    ];
    for policy in [Policy::Lru, Policy::Arc] {
        let mut index = index(3, policy);
        for (at, call) in calls.iter().enumerate() {
            let before = index.state_digest();
            call(&mut index)?;
            assert_ne!(index.state_digest(), before, "{policy:?}: call {at}");
        }
    }
    let mut index = lru(2);
    store(&mut index, &[1, 2])?;
    let touched = |number| {
        let mut index = index.clone();
        index.touch(&keys(&[number]));
        index.state_digest()
    };
    assert!(touched(1) != index.state_digest() && touched(2) == index.state_digest());
    Ok(())
}

#[test]
fn audit_sees_what_does_not_fit() -> Result<()> {
    type Break = fn(&mut OffloadIndex);
    let breaks: [(&str, Break); 8] = [
        ("O2", |index| index.slots.free(3)),
        ("O2", |index| {
            index.index.insert(key(9), 0);
        }),
        ("O2", |index| {
            index.index.remove(&key(1));
        }),
        ("O3", |index| index.draining.push_store(key(1), 0)),
        ("O3", |index| {
            index.draining.pop_store(&key(4));
        }),
        ("O3", |index| index.slots.set(0, State::DrainingLoads { reads: 0 })),
        ("O4", |index| index.order.clear()),
        ("O5", |index| {
            if let Order::Adaptive(order) = &mut index.order {
                order.remember(key(1));
            }
        }),
    ];
    for (name, broken) in breaks {
        let mut index = index(4, Policy::Arc);
        index.prepare_store(&keys(&[4]));
        index.reset();
        store(&mut index, &[1, 2])?;
        index.prepare_store(&keys(&[3]));
        index.audit()?;
        broken(&mut index);
        let error = index.audit().expect_err(name);
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    Ok(())
}
