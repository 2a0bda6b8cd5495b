//! Lists and memory on the host for making a plan.

use mla_runtime::Result;
use mla_runtime::room::{filled, with_room};

use crate::status::int;

/// Lists for steps of up to a certain number of requests, and the memory in which FlashInfer plans.
pub(crate) struct HostLists {
    /// Memory in which FlashInfer plans. Its unit is 16 bytes, since FlashInfer's lists begin at
    /// multiples of 16 bytes.
    pub(crate) staging: Vec<u128>,
    /// The start of each request's query tokens, and the end of all.
    pub(crate) query_starts: Vec<i32>,
    /// The start of the keys, or of the block table's entries, that each request reads, and the end
    /// of all.
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

    /// Copies the numbers of query tokens and of keys of each request. `read` says how many keys,
    /// or entries of the block table, each one reads. `field` names these.
    pub(crate) fn read(
        &mut self,
        [query_lens, key_lens]: [&[u32]; 2],
        field: &'static str,
        read: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let queries = query_lens.iter().map(|len| *len as usize);
        write_starts("query tokens", queries, &mut self.query_starts)?;
        write_starts(field, read, &mut self.starts)?;
        self.lens.clear();
        for len in key_lens {
            self.lens.push(int("length", *len as usize)?);
        }
        Ok(())
    }

    /// Empties the lists.
    pub(crate) fn clear(&mut self) {
        self.query_starts.clear();
        self.starts.clear();
        self.lens.clear();
    }

    /// Returns the numbers of query tokens.
    pub(crate) fn query_lens(&self) -> impl Iterator<Item = i32> {
        self.query_starts.windows(2).map(|pair| pair[1] - pair[0])
    }
}

fn write_starts(
    field: &'static str,
    lens: impl Iterator<Item = usize>,
    starts: &mut Vec<i32>,
) -> Result<()> {
    starts.clear();
    starts.push(0);
    let mut end = 0;
    for len in lens {
        end += len;
        starts.push(int(field, end)?);
    }
    Ok(())
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
