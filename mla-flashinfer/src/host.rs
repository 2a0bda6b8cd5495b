//! Lists and memory on the host for making a plan.

use mla_runtime::Result;
use mla_runtime::room::{filled, with_room};

/// Lists for steps of up to a certain number of requests, and the memory in which FlashInfer plans.
pub(crate) struct HostLists {
    /// Memory in which FlashInfer plans. Its unit is 16 bytes, since FlashInfer's lists begin at
    /// multiples of 16 bytes.
    pub(crate) staging: Vec<u128>,
    /// The start of each request's query tokens, and the end of all.
    pub(crate) query_starts: Vec<i32>,
    /// The start of the keys, or of the block table's entries, that each request reads.
    pub(crate) starts: Vec<i32>,
    /// Numbers of keys.
    pub(crate) lens: Vec<i32>,
}

impl HostLists {
    pub(crate) fn new(requests: usize, staging_bytes: usize) -> Result<Self> {
        let starts = requests.saturating_add(1);
        Ok(Self {
            staging: filled(0, staging_bytes.div_ceil(size_of::<u128>()))?,
            query_starts: with_room(starts)?,
            starts: with_room(starts)?,
            lens: with_room(requests)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use mla_runtime::Error;

    use super::*;

    #[test]
    fn limits_that_the_host_has_no_memory_for_are_an_error() {
        for (requests, staging) in [(usize::MAX, 16), (1 << 61, 16), (1, usize::MAX)] {
            let refused = HostLists::new(requests, staging).map(drop);
            assert!(
                matches!(refused, Err(Error::OutOfMemory { .. })),
                "{requests} requests, {staging} bytes: {refused:?}"
            );
        }
        let lists = HostLists::new(3, 40).unwrap();
        assert_eq!(lists.staging.len(), 3);
        assert!(lists.query_starts.capacity() >= 4 && lists.starts.capacity() >= 4);
        assert!(lists.lens.capacity() >= 3);
    }
}
