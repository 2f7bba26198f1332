//! The check of the invariants that span slots, index, draining queues and policy.

use crate::error::{Error, Result};
use crate::offload::OffloadIndex;
use crate::offload::slots::State;

impl OffloadIndex {
    /// Checks the invariants O1 to O5. See the module [`offload`](crate::offload).
    ///
    /// # Errors
    /// [`Error::Invariant`] naming the first that is broken.
    pub fn audit(&self) -> Result<()> {
        self.slots.audit()?;
        self.audit_index()?;
        self.draining.audit(&self.slots)?;
        let counts = self.slots.counts();
        let is_ready = |slot| self.slots.find(slot).is_some_and(|entry| matches!(entry.state, State::Ready { .. }));
        self.order.audit(counts.idle + counts.reading, is_ready, |key| self.index.contains_key(key))
    }

    /// O2, and what O3 says about ready keys.
    fn audit_index(&self) -> Result<()> {
        for (key, &slot) in &self.index {
            let ready = match self.slots.find(slot) {
                Some(entry) if entry.key == *key => match entry.state {
                    State::Writing { .. } => Some(false),
                    State::Ready { .. } => Some(true),
                    _ => None,
                },
                _ => None,
            };
            match ready {
                None => {
                    let entry = self.slots.find(slot);
                    return Err(Error::Invariant(format!("O2: {key:?} is found in slot {slot}, which is {entry:?}")));
                }
                Some(true) if self.draining.num_stores(key) > 0 => {
                    return Err(Error::Invariant(format!("O3: {key:?} is ready, but an older store is in flight")));
                }
                Some(_) => {}
            }
        }
        let counts = self.slots.counts();
        let (found, present) = (self.index.len(), counts.writing + counts.idle + counts.reading);
        if found != present {
            return Err(Error::Invariant(format!("O2: {found} keys are found, {present} slots hold one")));
        }
        Ok(())
    }
}
