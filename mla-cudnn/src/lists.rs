//! The lengths and offsets of a call's requests, as cuDNN reads them.

use std::ops::Range;

use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_runtime::room::with_room;
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

/// Number of lists of a call. Each has one entry more than there are requests.
pub(crate) const LISTS: usize = 7;

/// Number of calls of a step with their own places: the call for new tokens, and those for the
/// first context chunks.
const PLACES: usize = 9;

/// The tokens of one request that are passed to cuDNN.
pub(crate) struct Seen {
    pub(crate) query: Range<usize>,
    pub(crate) key: Range<usize>,
}

/// Lengths and offsets on the device.
///
/// Each of a step's calls has a place with a fixed address. When another step has been prepared, a
/// graph that was captured with the lists finds those of the new step there. All layers of a step
/// have the same lists, so they are copied once.
pub(crate) struct Lists {
    /// `[PLACES, LISTS, room]`: each call has two lists of lengths and five of offsets.
    device: Buffer,
    places: Vec<Place>,
    /// The number of entries of a list, one more than there are requests.
    room: usize,
    scratch: Vec<i32>,
}

/// The place of a call.
#[derive(Clone, Default)]
struct Place {
    /// The lists that the place holds.
    written: Vec<i32>,
    /// The strides between tokens from which the offsets were last computed.
    strides: Option<[usize; 4]>,
}

impl Lists {
    pub(crate) const fn bytes(requests: usize) -> usize {
        (PLACES * LISTS * size_of::<i32>()).saturating_mul(requests.saturating_add(1))
    }

    pub(crate) fn new(device: &Cuda, requests: usize) -> Result<Self> {
        Ok(Self {
            scratch: scratch(requests)?,
            device: device.allocate(Self::bytes(requests))?,
            places: vec![Place::default(); PLACES],
            room: requests.saturating_add(1),
        })
    }

    /// Returns the addresses of a call's lists, which describe these requests in tensors with these
    /// strides. All calls beyond the number of places use the last place.
    pub(crate) fn of(
        &mut self,
        device: &Cuda,
        call: usize,
        seen: &[Seen],
        strides: [usize; 4],
    ) -> Result<[u64; LISTS]> {
        let index = call.min(PLACES - 1);
        self.write(device, index, seen, strides)?;
        let list = self.room * size_of::<i32>();
        let begin = self.device.address() + (index * LISTS * list) as u64;
        Ok(std::array::from_fn(|number| begin + (number * list) as u64))
    }

    /// Writes the lists of a prepared step, if its call has a place and occurred before. Tensors
    /// keep their strides from step to step.
    pub(crate) fn prepare(&mut self, device: &Cuda, call: usize, seen: &[Seen]) -> Result<()> {
        match self.places.get(call).and_then(|place| place.strides) {
            Some(strides) => self.write(device, call, seen, strides),
            None => Ok(()),
        }
    }

    fn write(
        &mut self,
        device: &Cuda,
        index: usize,
        seen: &[Seen],
        strides: [usize; 4],
    ) -> Result<()> {
        if seen.len() >= self.room {
            let accepted = format!("at most {}", self.room - 1);
            return Err(Error::argument("requests", seen.len(), accepted));
        }
        write_lists(seen, strides, self.room, &mut self.scratch)?;
        let place = &mut self.places[index];
        if place.written != self.scratch {
            let bytes = LISTS * self.room * size_of::<i32>();
            let copied: Vec<u8> = self.scratch.iter().flat_map(|n| n.to_ne_bytes()).collect();
            let (_, behind) = Cuda::split_mut(self.device.bytes_mut(), index * bytes);
            let (to, _) = Cuda::split_mut(behind, bytes);
            device.upload(&copied, to)?;
            place.written.clone_from(&self.scratch);
        }
        place.strides = Some(strides);
        Ok(())
    }
}

/// Makes a list with room for all lists of a call.
fn scratch(requests: usize) -> Result<Vec<i32>> {
    with_room(LISTS.saturating_mul(requests.saturating_add(1)))
}

/// Returns the tokens of each request that are passed to cuDNN, and the query tokens that see no
/// key.
pub(crate) fn split(
    query_lens: &[u32],
    key_lens: &[u32],
    causal: bool,
) -> Result<(Vec<Seen>, Vec<Range<usize>>)> {
    if query_lens.len() != key_lens.len() {
        let accepted = format!("{}, as many as query lengths", query_lens.len());
        return Err(Error::argument("key lengths", key_lens.len(), accepted));
    }
    let (mut seen, mut unseen) = (Vec::with_capacity(key_lens.len()), Vec::new());
    let (mut query, mut key) = (0, 0);
    for (queries, keys) in query_lens.iter().zip(key_lens) {
        let (end, key_end) = (query + *queries as usize, key + *keys as usize);
        // The last query token sees all keys, and each earlier token sees one key less.
        let first = match (causal, key_end - key) {
            (_, 0) => end,
            (true, keys) => query.max(end.saturating_sub(keys)),
            (false, _) => query,
        };
        if query < first {
            unseen.push(query..first);
        }
        if first < end {
            seen.push(Seen {
                query: first..end,
                key: key..key_end,
            });
        }
        (query, key) = (end, key_end);
    }
    Ok((seen, unseen))
}

/// Returns true if all requests have these lengths, and lie one after the other from the first
/// token on.
pub(crate) fn are_equal(seen: &[Seen], query_len: usize, key_len: usize) -> bool {
    let is_nth = |tokens: &Range<usize>, len: usize, n: usize| *tokens == (n * len..(n + 1) * len);
    let mut numbered = seen.iter().enumerate();
    numbered.all(|(n, it)| is_nth(&it.query, query_len, n) && is_nth(&it.key, key_len, n))
}

/// Writes the lengths and offsets of a call, each list with room for `room` entries.
fn write_lists(
    seen: &[Seen],
    [query, key, value, out]: [usize; 4],
    room: usize,
    written: &mut Vec<i32>,
) -> Result<()> {
    written.clear();
    written.resize(LISTS * room, 0);
    let offset = |field, token: usize, stride: usize| {
        let elements = token.checked_mul(stride).map(i32::try_from);
        elements.and_then(std::result::Result::ok).ok_or_else(|| {
            let given = format!("{token} tokens of {stride} elements");
            Error::argument(field, given, "at most 2147483647 elements in all")
        })
    };
    for (i, request) in seen.iter().enumerate() {
        written[i] = int("query tokens", request.query.len())?;
        written[room + i] = int("keys", request.key.len())?;
    }
    let last = seen.last();
    let last = last.map_or((0, 0), |last| (last.query.end, last.key.end));
    let begins = seen.iter().map(|seen| (seen.query.start, seen.key.start));
    for (i, (first_query, first_key)) in begins.chain([last]).enumerate() {
        let offsets = [
            offset("query", first_query, query)?,
            offset("keys", first_key, key)?,
            offset("values", first_key, value)?,
            offset("output", first_query, out)?,
            offset("lse", first_query, 1)?,
        ];
        for (list, offset) in offsets.into_iter().enumerate() {
            written[(2 + list) * room + i] = offset;
        }
    }
    Ok(())
}

pub(crate) fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_the_host_has_no_memory_for_are_an_error() {
        for requests in [usize::MAX, 1 << 61] {
            let refused = scratch(requests).map(drop);
            assert!(
                matches!(refused, Err(Error::OutOfMemory { .. })),
                "{requests} requests: {refused:?}"
            );
        }
        assert!(scratch(3).unwrap().capacity() >= 4 * LISTS);
    }

    #[test]
    fn requests_without_queries_or_keys_are_left_out_and_their_rows_filled() {
        let ranges = |causal| -> (Vec<_>, _) {
            let (seen, unseen) = split(&[3, 0, 2, 4], &[3, 5, 0, 1], causal).unwrap();
            let seen = seen.into_iter().map(|seen| (seen.query, seen.key));
            (seen.collect(), unseen)
        };
        let expected = (vec![(0..3, 0..3), (8..9, 8..9)], vec![3..5, 5..8]);
        assert_eq!(ranges(true), expected);
        let (seen, unseen) = ranges(false);
        assert_eq!(seen, [(0..3, 0..3), (5..9, 8..9)]);
        assert_eq!((unseen.len(), &unseen[0]), (1, &(3..5)));
        assert!(split(&[1], &[1, 2], true).is_err());
    }

    #[test]
    fn requests_are_equal_if_nothing_lies_between_them() {
        let equal = |queries: &[u32], keys: &[u32], causal, key_len| {
            let (seen, _) = split(queries, keys, causal).unwrap();
            are_equal(&seen, 64, key_len)
        };
        assert!(equal(&[64, 0, 64], &[128, 0, 128], true, 128));
        assert!(!equal(&[64, 0, 64], &[128, 0, 128], true, 256));
        // Some keys are not seen by any query token, a length differs, or rows see nothing.
        assert!(!equal(&[64, 0, 64], &[128, 1, 128], true, 128));
        assert!(!equal(&[64, 63], &[64, 63], true, 64));
        assert!(!equal(&[64, 64], &[63, 64], true, 64));
        assert!(!equal(&[1, 64], &[0, 64], false, 64));
    }

    #[test]
    fn offsets_are_elements_of_each_tensor_and_bounded() {
        let seen = [Seen {
            query: 2..5,
            key: 7..9,
        }];
        let mut written = Vec::new();
        write_lists(&seen, [10, 20, 30, 40], 2, &mut written).unwrap();
        let lists: Vec<_> = written.chunks(2).collect();
        let expected = [
            [3, 0],
            [2, 0],
            [20, 50],
            [140, 180],
            [210, 270],
            [80, 200],
            [2, 5],
        ];
        assert_eq!(lists, expected);
        let error = write_lists(&seen, [1 << 30, 1, 1, 1], 2, &mut written).unwrap_err();
        assert!(error.to_string().starts_with("query: given 2 tokens of"));
    }
}
