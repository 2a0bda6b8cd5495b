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

    /// N·I: the number of tokens after which the dealing starts again at rank 0.
    const fn period(self) -> u64 {
        self.world as u64 * self.interleave as u64
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

    /// Counts the tokens among a request's first `len` that a rank holds: ⌊len / (N·I)⌋·I +
    /// clamp(len mod (N·I) − rank·I, 0, I).
    ///
    /// # Errors
    ///
    /// If there is no such rank.
    pub fn local_len(self, len: u32, rank: u32) -> Result<u32> {
        self.check_rank(rank)?;
        let (len, interleave) = (u64::from(len), u64::from(self.interleave));
        let before = u64::from(rank) * interleave;
        let rest = (len % self.period()).saturating_sub(before).min(interleave);
        // At most `len`, so it fits 32 bits.
        Ok((len / self.period() * interleave + rest) as u32)
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

    fn local_lens(parallel: ContextParallel, len: u32) -> Vec<u32> {
        let lens = (0..parallel.world()).map(|rank| parallel.local_len(len, rank));
        lens.collect::<Result<_>>().unwrap()
    }

    #[test]
    fn known_local_lengths() {
        let parallel = ContextParallel::new(4, 1).unwrap();
        assert_eq!(local_lens(parallel, 65), [17, 16, 16, 16]);
        assert_eq!(local_lens(parallel, 96), [24, 24, 24, 24]);
        let parallel = ContextParallel::new(2, 64).unwrap();
        assert_eq!(local_lens(parallel, 3000), [1528, 1472]);
    }

    #[test]
    fn refuses_what_cannot_be() {
        let parallel = ContextParallel::new(2, 16).unwrap();
        let messages = [
            ContextParallel::new(0, 1).unwrap_err(),
            ContextParallel::new(1025, 1).unwrap_err(),
            ContextParallel::new(2, 0).unwrap_err(),
            parallel.local_len(10, 2).unwrap_err(),
        ]
        .map(|error| error.to_string());
        assert_eq!(
            messages,
            [
                "world: given 0, accepted 1 to 1024",
                "world: given 1025, accepted 1 to 1024",
                "interleave: given 0, accepted at least 1",
                "rank: given 2, accepted 0 to 1",
            ]
        );
    }

    fn parallel() -> impl Strategy<Value = ContextParallel> {
        (1u32..9, 1u32..70).prop_map(|(n, i)| ContextParallel::new(n, i).unwrap())
    }

    proptest! {
        /// The formula agrees with a count.
        #[test]
        fn local_lengths_count_tokens(parallel in parallel(), len in 0u32..2000) {
            let mut counted = vec![0u32; parallel.world() as usize];
            for position in 0..u64::from(len) {
                let rank = parallel.rank_of(position) as usize;
                // Local positions have no gaps.
                prop_assert_eq!(parallel.local_position(position), u64::from(counted[rank]));
                counted[rank] += 1;
            }
            prop_assert_eq!(local_lens(parallel, len), counted);
        }

        #[test]
        fn local_lengths_sum_to_the_whole(
            world in 1..=ContextParallel::MAX_WORLD,
            interleave in 1..=u32::MAX,
            len: u32,
        ) {
            let parallel = ContextParallel::new(world, interleave).unwrap();
            let sum: u64 = local_lens(parallel, len).into_iter().map(u64::from).sum();
            prop_assert_eq!(sum, u64::from(len));
        }
    }
}
