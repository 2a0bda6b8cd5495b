//! Slot mapping: the slot of each token's row in the paged cache.
//!
//! The cache is a list of pages with the same number of rows each. A request's block table lists
//! the pages of its tokens in order, so the token at position p is at
//!
//! ```text
//! slot = block_table[request][p / page_size] · page_size + p mod page_size
//! ```
//!
//! Slots are 64-bit integers, because a cache of 2³¹ pages has more rows than 32 bits can count. A
//! write skips a token whose slot is [`SKIPPED`].
//!
//! Under [context parallelism](super::parallel) each rank has its own cache and block tables for
//! the tokens it holds. All other tokens are skipped there.

use std::fmt::Display;

use super::parallel::ContextParallel;
use crate::batch::Request;
use crate::room::with_room;
use crate::{Error, Result};

/// The slot of a token that is not written.
pub const SKIPPED: i64 = -1;

/// Returns an entry as a page, or a description of the accepted numbers.
pub(crate) fn page_of(entry: impl TryInto<i64>) -> Result<i32, &'static str> {
    match entry.try_into() {
        Ok(page) if page < 0 => Err("a page, 0 or above"),
        page => (page.ok())
            .and_then(|page| i32::try_from(page).ok())
            .ok_or("a page, at most 2147483647"),
    }
}

/// The block tables of a batch, and the page size. Pages may have any integer type.
#[derive(Clone, Copy, Debug)]
pub struct BlockTables<'a, T = i32> {
    pages: &'a [T],
    max_pages: usize,
    page_size: u32,
}

impl<'a, T: Copy + Display + TryInto<i64>> BlockTables<'a, T> {
    /// Tables from `pages`, `[requests, max_pages]`, row by row. Entries after a request's last
    /// page may hold anything.
    ///
    /// # Errors
    ///
    /// If `max_pages` or `page_size` is zero, or `pages` is not a whole number of rows.
    pub fn new(pages: &'a [T], max_pages: usize, page_size: u32) -> Result<Self> {
        if max_pages == 0 {
            return Err(Error::argument("max_pages", 0, "at least 1"));
        }
        if page_size == 0 {
            return Err(Error::argument("page_size", 0, "at least 1"));
        }
        if !pages.len().is_multiple_of(max_pages) {
            return Err(Error::argument(
                "block_table",
                format!("{} entries", pages.len()),
                format!("rows of max_pages = {max_pages} entries"),
            ));
        }
        Ok(Self {
            pages,
            max_pages,
            page_size,
        })
    }

    /// The entries, row by row.
    pub const fn entries(&self) -> &'a [T] {
        self.pages
    }

    /// The number of entries in a row.
    pub const fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// The number of tokens in a page.
    pub const fn page_size(&self) -> u32 {
        self.page_size
    }

    /// The number of requests.
    pub const fn requests(&self) -> usize {
        self.pages.len() / self.max_pages
    }

    /// The slot of the token at a position of a request.
    ///
    /// # Errors
    ///
    /// If there is no such request, if its row is too short for the position, or if the entry is no
    /// valid page.
    pub fn slot(&self, request: usize, position: u64) -> Result<i64> {
        if request >= self.requests() {
            let accepted = format!("less than the {} rows of the block table", self.requests());
            return Err(Error::argument("request", request, accepted));
        }
        let (page, offset) = (
            position / u64::from(self.page_size),
            position % u64::from(self.page_size),
        );
        let index = usize::try_from(page)
            .ok()
            .filter(|&index| index < self.max_pages)
            .ok_or_else(|| {
                Error::argument(
                    format!("the position of a token of request {request}"),
                    position,
                    format!(
                        "within its {} pages of {} tokens",
                        self.max_pages, self.page_size
                    ),
                )
            })?;
        let entry = self.pages[request * self.max_pages + index];
        let page = page_of(entry).map_err(|accepted| {
            let field = format!("block_table[{request}][{index}]");
            Error::argument(field, entry, accepted)
        })?;
        // At most 2³¹·2³², far within 64 bits.
        Ok(i64::from(page) * i64::from(self.page_size) + offset as i64)
    }

    /// The slot of a request's token in the cache of one rank, whose block tables these are. It is
    /// [`SKIPPED`] if another rank holds the token.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::slot`] for the token's local position. A skipped token needs no page.
    /// Also if there is no such rank.
    pub fn local_slot(
        &self,
        request: usize,
        position: u64,
        parallel: ContextParallel,
        rank: u32,
    ) -> Result<i64> {
        if rank >= parallel.world() {
            let accepted = format!("0 to {}", parallel.world() - 1);
            return Err(Error::argument("rank", rank, accepted));
        }
        if parallel.rank_of(position) == rank {
            self.slot(request, parallel.local_position(position))
        } else {
            Ok(SKIPPED)
        }
    }

    /// The slots of a batch's new tokens, request by request. The new tokens of a request are at
    /// the positions from kv − q to kv. Padding has a kv of 0, and its slots are [`SKIPPED`].
    ///
    /// # Errors
    ///
    /// If there are more requests than rows, if a request has more new tokens than tokens in all,
    /// or if the host lacks memory. Also the errors of [`Self::slot`].
    pub fn new_token_slots(&self, requests: &[Request]) -> Result<Vec<i64>> {
        self.new_token_slots_on(requests, ContextParallel::SINGLE, 0)
    }

    /// The same slots on one rank. A token that another rank holds has the slot [`SKIPPED`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::new_token_slots`] and [`Self::local_slot`].
    pub fn new_token_slots_on(
        &self,
        requests: &[Request],
        parallel: ContextParallel,
        rank: u32,
    ) -> Result<Vec<i64>> {
        let new_tokens: u64 = requests.iter().map(|request| u64::from(request.q)).sum();
        let mut slots = with_room(usize::try_from(new_tokens).unwrap_or(usize::MAX))?;
        for (index, request) in requests.iter().enumerate() {
            if request.is_padding() {
                slots.extend((0..request.q).map(|_| SKIPPED));
                continue;
            }
            let start = request.kv.checked_sub(request.q).ok_or_else(|| {
                Error::argument(
                    format!("requests[{index}].kv"),
                    request.kv,
                    format!("at least its {} new tokens", request.q),
                )
            })?;
            for position in start..request.kv {
                slots.push(self.local_slot(index, position.into(), parallel, rank)?);
            }
        }
        Ok(slots)
    }

    /// The slots of tokens that are listed one by one as (request, position), as engines list them.
    /// A negative request or position marks a token that is not written: its slot is [`SKIPPED`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::slot`].
    pub fn slots_of(&self, tokens: impl IntoIterator<Item = (i32, i64)>) -> Result<Vec<i64>> {
        tokens
            .into_iter()
            .map(
                |(request, position)| match (usize::try_from(request), u64::try_from(position)) {
                    (Ok(request), Ok(position)) => self.slot(request, position),
                    _ => Ok(SKIPPED),
                },
            )
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_slots() {
        let tables = BlockTables::new(&[7, 2, -9, 0, 5, 1], 3, 16).unwrap();
        assert_eq!(tables.requests(), 2);
        for (request, position, slot) in [
            (0, 0, 112),
            (0, 15, 127),
            (0, 16, 32),
            (1, 0, 0),
            (1, 31, 95),
            (1, 47, 31),
        ] {
            assert_eq!(tables.slot(request, position), Ok(slot));
        }
        let requests = [Request { q: 2, kv: 17 }, Request { q: 1, kv: 33 }];
        assert_eq!(tables.new_token_slots(&requests), Ok(vec![127, 32, 16]));
        let padded = [Request { q: 2, kv: 0 }, Request { q: 1, kv: 33 }];
        let slots = tables.new_token_slots(&padded);
        assert_eq!(slots, Ok(vec![SKIPPED, SKIPPED, 16]));
        let listed = [(1, 32), (-1, 5), (0, -1), (0, 1)];
        assert_eq!(tables.slots_of(listed), Ok(vec![16, -1, -1, 113]));
    }

    #[test]
    fn slots_are_64_bit() {
        let tables = BlockTables::new(&[i32::MAX], 1, u32::MAX).unwrap();
        let last = u64::from(u32::MAX) - 1;
        // The last row of 2³¹ pages of 2³² − 1 rows: 2⁶³ − 2³¹ − 1.
        assert_eq!(tables.slot(0, last), Ok(i64::MAX - (1 << 31)));
    }

    #[test]
    fn refusals() {
        let tables = BlockTables::new(&[7, -2], 2, 16).unwrap();
        let parallel = ContextParallel::new(2, 1).unwrap();
        let short = [Request { q: 3, kv: 2 }];
        let messages = [
            BlockTables::new(&[1], 0, 16).unwrap_err(),
            BlockTables::new(&[1], 1, 0).unwrap_err(),
            BlockTables::new(&[1, 2, 3], 2, 16).unwrap_err(),
            tables.slot(1, 0).unwrap_err(),
            tables.slot(0, 32).unwrap_err(),
            tables.slot(0, u64::MAX).unwrap_err(),
            tables.slot(0, 16).unwrap_err(),
            tables.local_slot(0, 0, parallel, 2).unwrap_err(),
            tables.new_token_slots(&short).unwrap_err(),
        ]
        .map(|error| error.to_string().replacen(", accepted", " /", 1));
        assert_eq!(
            messages,
            [
                "max_pages: given 0 / at least 1",
                "page_size: given 0 / at least 1",
                "block_table: given 3 entries / rows of max_pages = 2 entries",
                "request: given 1 / less than the 1 rows of the block table",
                "the position of a token of request 0: given 32 / within its 2 pages of 16 tokens",
                "the position of a token of request 0: given 18446744073709551615 / within its 2 \
                 pages of 16 tokens",
                "block_table[0][1]: given -2 / a page, 0 or above",
                "rank: given 2 / 0 to 1",
                "requests[0].kv: given 2 / at least its 3 new tokens",
            ]
        );
    }

    proptest! {
        /// Compares slots with an oracle that lists every row of the cache.
        #[test]
        fn slots_agree_with_walking_the_pages(
            page_size in 1u32..9,
            lens in proptest::collection::vec((0u32..20, 0u32..20), 1..6),
            shuffle in any::<prop::sample::Index>(),
        ) {
            let requests: Vec<Request> =
                lens.iter().map(|&(q, context)| Request { q, kv: q + context }).collect();
            let max_pages = requests.iter().map(|r| r.kv.div_ceil(page_size)).max().unwrap().max(1);
            let count = requests.len() * max_pages as usize;
            // Distinct pages, in an order other than ascending.
            let turn = shuffle.index(count);
            let pages: Vec<i32> = (0..count).map(|at| ((at * 7 + turn) % count) as i32).collect();
            prop_assume!(!count.is_multiple_of(7));
            let tables = BlockTables::new(&pages, max_pages as usize, page_size).unwrap();

            let mut expected: Vec<i64> = Vec::new();
            for (index, request) in requests.iter().enumerate() {
                let row = &pages[index * max_pages as usize..][..max_pages as usize];
                let rows: Vec<i64> = row
                    .iter()
                    .flat_map(|&page| {
                        (0..i64::from(page_size)).map(move |row| {
                            i64::from(page) * i64::from(page_size) + row
                        })
                    })
                    .collect();
                expected.extend(&rows[request.context_len() as usize..request.kv as usize]);
            }
            let slots = tables.new_token_slots(&requests).unwrap();
            prop_assert_eq!(&slots, &expected);
            let mut distinct = slots.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), slots.len());
        }

        /// Every token is written on exactly one rank, at its local position there.
        #[test]
        fn every_token_is_on_one_rank(
            world in 1u32..5,
            interleave in 1u32..5,
            page_size in 1u32..5,
            kv in 1u32..60,
        ) {
            let parallel = ContextParallel::new(world, interleave).unwrap();
            let pages: Vec<i32> = (0..60).rev().collect();
            let tables = BlockTables::new(&pages, 60, page_size).unwrap();
            let request = [Request { q: kv, kv }];
            let all: Vec<Vec<i64>> = (0..world)
                .map(|rank| tables.new_token_slots_on(&request, parallel, rank).unwrap())
                .collect();
            for position in 0..kv as usize {
                let written: Vec<usize> =
                    (0..all.len()).filter(|&rank| all[rank][position] != SKIPPED).collect();
                prop_assert_eq!(&written, &[parallel.rank_of(position as u64) as usize]);
            }
            for (rank, slots) in all.iter().enumerate() {
                let written: Vec<i64> =
                    slots.iter().copied().filter(|&slot| slot != SKIPPED).collect();
                let local = parallel.local_len(kv, rank as u32).unwrap();
                let alone = [Request { q: local, kv: local }];
                prop_assert_eq!(written, tables.new_token_slots(&alone).unwrap());
            }
        }
    }
}
