//! Context parallelism: the distribution of tokens over ranks.
//!
//! The cache of one request is dealt to N ranks like cards, in blocks of I consecutive tokens (the
//! interleave):
//!
//! ```text
//! N = 2, I = 2:   token  0 1 2 3 4 5 6 7 8
//!                 rank   0 0 1 1 0 0 1 1 0
//! ```
//!
//! Each rank numbers its tokens from zero, without gaps. These numbers are its local positions.

use super::lcm;
use crate::{Error, Result};

/// The distribution of a request's tokens over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ContextParallel {
    world: u32,
    interleave: u32,
}

impl ContextParallel {
    /// The maximum number of ranks.
    pub const MAX_WORLD: u32 = 1024;

    /// One rank, which holds every token.
    pub const SINGLE: Self = Self {
        world: 1,
        interleave: 1,
    };

    /// A distribution over N ranks with an interleave of I tokens.
    ///
    /// With one rank the interleave does not matter and becomes 1.
    ///
    /// # Errors
    ///
    /// If `world` is not within 1 to [`Self::MAX_WORLD`], or `interleave` is zero.
    pub fn new(world: u32, interleave: u32) -> Result<Self> {
        if !(1..=Self::MAX_WORLD).contains(&world) {
            let accepted = format!("1 to {}", Self::MAX_WORLD);
            return Err(Error::argument("world", world, accepted));
        }
        if interleave == 0 {
            return Err(Error::argument("interleave", 0, "at least 1"));
        }
        if world == 1 {
            return Ok(Self::SINGLE);
        }
        Ok(Self { world, interleave })
    }

    /// N: the number of ranks.
    pub const fn world(self) -> u32 {
        self.world
    }

    /// I: the number of consecutive tokens that go to one rank.
    pub const fn interleave(self) -> u32 {
        self.interleave
    }

    /// N·I: the number of tokens after which the dealing starts again at rank 0.
    pub const fn period(self) -> u64 {
        self.world as u64 * self.interleave as u64
    }

    /// lcm(page, N·I). If a context is cut at a multiple of it, the cut lies at the start of a
    /// page, and every rank's shard starts with a whole interleave block.
    ///
    /// # Errors
    ///
    /// If `page` is zero or the result exceeds 64 bits.
    pub fn alignment(self, page: u32) -> Result<u64> {
        if page == 0 {
            return Err(Error::argument("align", 0, "at least 1"));
        }
        lcm(page.into(), self.period()).ok_or(Error::overflow("the alignment lcm(page, N·I)"))
    }

    /// The rank that holds the token at this position: (i / I) mod N.
    pub const fn rank_of(self, position: u64) -> u32 {
        (position / self.interleave as u64 % self.world as u64) as u32
    }

    /// Returns the local position of the token at this position: ⌊i / (N·I)⌋·I + i mod I.
    pub const fn local_position(self, position: u64) -> u64 {
        let interleave = self.interleave as u64;
        position / self.period() * interleave + position % interleave
    }

    /// The position of the token at a local position of a rank: the inverse of [`Self::rank_of`]
    /// and [`Self::local_position`] together.
    ///
    /// # Errors
    ///
    /// If there is no such rank, or the position exceeds 64 bits.
    pub fn global_position(self, rank: u32, local: u64) -> Result<u64> {
        self.check_rank(rank)?;
        let interleave = u64::from(self.interleave);
        (local / interleave)
            .checked_mul(self.period())
            .and_then(|start| start.checked_add(u64::from(rank) * interleave + local % interleave))
            .ok_or(Error::overflow("the global position"))
    }

    /// Counts the tokens among a request's first `len` that a rank holds: ⌊len / (N·I)⌋·I +
    /// clamp(len mod (N·I) − rank·I, 0, I).
    ///
    /// # Errors
    ///
    /// If there is no such rank.
    pub fn local_len(self, len: u32, rank: u32) -> Result<u32> {
        self.check_rank(rank)?;
        Ok(self.local_len_of(len, rank))
    }

    /// [`Self::local_len`] of every rank, in rank order. The sum is `len`.
    pub fn local_lens(self, len: u32) -> Vec<u32> {
        (0..self.world)
            .map(|rank| self.local_len_of(len, rank))
            .collect()
    }

    /// ⌈len / (N·I)⌉·I: the number of rows that every rank reserves for the first `len` tokens. All
    /// ranks' shards thus have one size, and no rank holds more tokens than that.
    pub const fn padded_local_len(self, len: u32) -> u64 {
        (len as u64).div_ceil(self.period()) * self.interleave as u64
    }

    fn local_len_of(self, len: u32, rank: u32) -> u32 {
        let (len, interleave) = (u64::from(len), u64::from(self.interleave));
        let before = u64::from(rank) * interleave;
        let rest = (len % self.period()).saturating_sub(before).min(interleave);
        // At most `len`, so it fits 32 bits.
        (len / self.period() * interleave + rest) as u32
    }

    fn check_rank(self, rank: u32) -> Result<()> {
        if rank < self.world {
            return Ok(());
        }
        let accepted = format!("0 to {}", self.world - 1);
        Err(Error::argument("rank", rank, accepted))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn deals_like_cards() {
        let ranks = |world, interleave| {
            let parallel = ContextParallel::new(world, interleave).unwrap();
            (0..9).map(|i| parallel.rank_of(i)).collect::<Vec<_>>()
        };
        assert_eq!(ranks(2, 2), [0, 0, 1, 1, 0, 0, 1, 1, 0]);
        assert_eq!(ranks(3, 1), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
        assert_eq!(ranks(1, 64), [0; 9]);
    }

    #[test]
    fn known_local_lengths() {
        let parallel = ContextParallel::new(4, 1).unwrap();
        assert_eq!(parallel.local_lens(65), [17, 16, 16, 16]);
        assert_eq!(parallel.local_lens(96), [24, 24, 24, 24]);
        assert_eq!(parallel.padded_local_len(65), 17);
        let parallel = ContextParallel::new(2, 64).unwrap();
        assert_eq!(parallel.local_lens(3000), [1528, 1472]);
        assert_eq!(parallel.padded_local_len(3000), 1536);
        assert_eq!(parallel.padded_local_len(0), 0);
    }

    #[test]
    fn refuses_what_cannot_be() {
        let parallel = ContextParallel::new(2, 16).unwrap();
        let messages = [
            ContextParallel::new(0, 1).unwrap_err(),
            ContextParallel::new(1025, 1).unwrap_err(),
            ContextParallel::new(2, 0).unwrap_err(),
            parallel.local_len(10, 2).unwrap_err(),
            parallel.global_position(2, 0).unwrap_err(),
            parallel.global_position(1, u64::MAX).unwrap_err(),
            parallel.alignment(0).unwrap_err(),
        ]
        .map(|error| error.to_string());
        assert_eq!(
            messages,
            [
                "world: given 0, accepted 1 to 1024",
                "world: given 1025, accepted 1 to 1024",
                "interleave: given 0, accepted at least 1",
                "rank: given 2, accepted 0 to 1",
                "rank: given 2, accepted 0 to 1",
                "the global position: given more than fits, accepted at most 18446744073709551615",
                "align: given 0, accepted at least 1",
            ]
        );
    }

    fn parallel() -> impl Strategy<Value = ContextParallel> {
        (1u32..9, 1u32..70).prop_map(|(n, i)| ContextParallel::new(n, i).unwrap())
    }

    proptest! {
        /// Every token has one rank and one local position, from which its position can be
        /// computed.
        #[test]
        fn positions_round_trip(parallel in parallel(), position in 0u64..1 << 40) {
            let (rank, local) = (parallel.rank_of(position), parallel.local_position(position));
            prop_assert_eq!(parallel.global_position(rank, local), Ok(position));
        }

        /// The formula agrees with a count, the ranks' shards add up, and no shard exceeds its
        /// rows.
        #[test]
        fn local_lengths_count_tokens(parallel in parallel(), len in 0u32..2000) {
            let lens = parallel.local_lens(len);
            let mut counted = vec![0u32; parallel.world() as usize];
            for position in 0..u64::from(len) {
                let rank = parallel.rank_of(position) as usize;
                // Local positions have no gaps.
                prop_assert_eq!(parallel.local_position(position), u64::from(counted[rank]));
                counted[rank] += 1;
            }
            prop_assert_eq!(&lens, &counted);
            for (rank, &local) in lens.iter().enumerate() {
                prop_assert_eq!(parallel.local_len(len, rank as u32), Ok(local));
                prop_assert!(u64::from(local) <= parallel.padded_local_len(len));
            }
        }

        #[test]
        fn local_lengths_sum_to_the_whole(
            world in 1..=ContextParallel::MAX_WORLD,
            interleave in 1..=u32::MAX,
            len: u32,
        ) {
            let parallel = ContextParallel::new(world, interleave).unwrap();
            let sum: u64 = parallel.local_lens(len).into_iter().map(u64::from).sum();
            prop_assert_eq!(sum, u64::from(len));
        }
    }
}
