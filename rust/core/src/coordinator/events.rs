//! Events as consumers expect them: one per member group.

use super::Coordinator;
use crate::ids::GroupId;
use crate::pool::events::{BlockUse, PoolEvent};

/// A change of what can be found in the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The blocks of a range of a request's tokens became findable, those that can be part of a hit.
    Stored {
        /// The group that stored them.
        group: GroupId,
        /// The request that computed them.
        request_id: Box<str>,
        /// Their hashes, in the order of the tokens.
        block_hashes: Vec<Box<[u8]>>,
        /// The first token that each of them covers.
        block_starts: Vec<u64>,
        /// The hash before the first one, unless it is the request's first.
        parent_block_hash: Option<Box<[u8]>>,
        /// First token of the range.
        start_token: u64,
        /// The token after the range.
        end_token: u64,
        /// Tokens each hash stands for.
        block_tokens: u64,
    },
    /// A block can no longer be found by this hash.
    Removed {
        /// The group that stored it.
        group: GroupId,
        /// The hash.
        block_hash: Box<[u8]>,
    },
    /// Nothing can be found any more.
    Cleared,
}

impl Coordinator {
    /// Hands out the uses of blocks since the last call, oldest first. Always empty unless they are noted.
    pub fn take_uses(&mut self) -> Vec<BlockUse> {
        self.pool.uses.take()
    }

    /// Hands out the events since the last call, oldest first. Always empty unless events were switched on.
    pub fn take_events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.pool.events.take() {
            match event {
                PoolEvent::Stored { request, set, keys, starts, parent, start_token, end_token, tokens_per_key } => {
                    for &group in &self.geometry.sets[set as usize].group_ids {
                        events.push(Event::Stored {
                            group,
                            request_id: request.clone(),
                            block_hashes: keys.iter().map(|key| key.split_block().0.into()).collect(),
                            parent_block_hash: parent.clone(),
                            block_starts: starts.to_vec(),
                            start_token,
                            end_token,
                            block_tokens: tokens_per_key,
                        });
                    }
                }
                PoolEvent::Removed(key) => {
                    let (hash, set) = key.split_block();
                    for &group in &self.geometry.sets[set as usize].group_ids {
                        events.push(Event::Removed { group, block_hash: hash.into() });
                    }
                }
                PoolEvent::Cleared => events.push(Event::Cleared),
            }
        }
        events
    }
}
