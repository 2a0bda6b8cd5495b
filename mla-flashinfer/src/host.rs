//! Lists and memory of the host in which a plan is made.

use mla_runtime::Result;
use mla_runtime::room::{filled, with_room};

/// Lists for steps of up to a number of requests, and the memory that FlashInfer plans in.
pub(crate) struct HostLists {
    /// Memory in which FlashInfer plans, in units of 16 bytes, since its lists begin at multiples
    /// of that.
    pub(crate) staging: Vec<u128>,
    /// Starts of query tokens, and their end.
    pub(crate) query_starts: Vec<i32>,
    /// Starts of what a request reads, keys or entries of a block table.
    pub(crate) starts: Vec<i32>,
    /// Lengths in keys.
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
