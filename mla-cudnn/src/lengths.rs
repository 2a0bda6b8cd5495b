//! Lengths with their own plans.

use std::sync::{PoisonError, RwLock};

/// The lengths at which requests of equal length have their own plan.
///
/// cuDNN attends to requests of equal length in 3 to 14% less time than to ragged ones, by a plan
/// for exactly this length and number of requests. Such a plan is built when a batch first has that
/// shape. This takes 40 to 80 ms, and half a second for some shapes. A workspace keeps the plan
/// until 512 others were used since. Plans that a graph was captured with are always kept.
///
/// A plan is worth its time for lengths that occur again and again: those of [chunks](Self::Chunks)
/// of prompts, and those that the engine knows. If an engine cannot wait for a build while it
/// serves, it runs one step of each shape beforehand, as it does before it captures a step.
///
/// A batch gets such a plan if all its requests have the same number of query tokens and the same
/// number of keys, and both numbers are among these lengths.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum ExactLengths {
    /// Powers of two from 64 on, and multiples of 512.
    #[default]
    Chunks,
    /// The lengths of [`Chunks`](Self::Chunks), and further ones.
    And(Vec<usize>),
    /// All lengths that occur, as in PyTorch. A plan is built when a length first occurs, and when
    /// it occurs again after 512 others.
    All,
}

static CHOSEN: RwLock<ExactLengths> = RwLock::new(ExactLengths::Chunks);

/// Chooses the lengths with their own plans, for all layers that this program makes afterwards.
///
/// ```
/// use mla_cudnn::{ExactLengths, set_exact_lengths};
///
/// // The prompts of this service have 3000 tokens.
/// set_exact_lengths(ExactLengths::And(vec![3000]));
/// ```
pub fn set_exact_lengths(lengths: ExactLengths) {
    *CHOSEN.write().unwrap_or_else(PoisonError::into_inner) = lengths;
}

/// Returns the lengths that were chosen last.
#[cfg(feature = "cudnn")]
pub(crate) fn chosen() -> ExactLengths {
    let chosen = CHOSEN.read().unwrap_or_else(PoisonError::into_inner);
    chosen.clone()
}

#[cfg(any(feature = "cudnn", test))]
impl ExactLengths {
    /// Returns true if requests of this length have their own plan.
    pub(crate) fn has(&self, len: usize) -> bool {
        let is_chunk = len >= 64 && len.is_power_of_two() || len.is_multiple_of(512);
        len > 0
            && match self {
                Self::Chunks => is_chunk,
                Self::And(lengths) => is_chunk || lengths.contains(&len),
                Self::All => true,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_plans_of_their_own_and_what_was_asked_for_has_too() {
        let lengths = [
            0, 1, 32, 64, 96, 500, 512, 1000, 1024, 1536, 3000, 3072, 8192,
        ];
        let that_have = |exact: ExactLengths| -> Vec<_> {
            lengths.into_iter().filter(|len| exact.has(*len)).collect()
        };
        let chunks = [64, 512, 1024, 1536, 3072, 8192];
        assert_eq!(that_have(ExactLengths::Chunks), chunks);
        let and = that_have(ExactLengths::And(vec![0, 3000, 1]));
        assert_eq!(and, [1, 64, 512, 1024, 1536, 3000, 3072, 8192]);
        assert_eq!(that_have(ExactLengths::All), lengths[1..]);
    }
}
