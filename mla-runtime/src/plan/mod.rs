//! Planning a step: pure functions of lengths and dims, without a device.
//!
//! An engine that schedules a step asks, in this order:
//!
//! 1. [`split`]: which requests take the absorbed path and which the expanded one, and in what
//!    order they stand in the batch;
//! 2. [`slots`]: where the new tokens' cache rows are written;
//! 3. [`context`]: in which chunks the expanded path reads cached context, so that a workspace of
//!    a fixed number of rows suffices.
//!
//! Before the first step it asks [`workspace`] how many rows that workspace should have,
//! [`memory`] how many bytes everything takes, and [`crossover`] up to how many query tokens the
//! absorbed path is the cheaper one. [`parallel`] tells which rank holds which token when the
//! cache is spread over several devices.
//!
//! All arithmetic is checked: a quantity that does not fit is an [error](crate::Error), never a
//! panic or a wrapped number.

pub mod context;
pub mod crossover;
pub(crate) mod index;
pub mod limits;
pub mod memory;
pub mod parallel;
pub mod slots;
pub mod split;
pub mod workspace;

/// The least common multiple of two positive numbers, or `None` if it exceeds 64 bits.
const fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_common_multiples() {
        for (a, b, expected) in [
            (1, 1, Some(1)),
            (64, 1, Some(64)),
            (64, 48, Some(192)),
            (7, 13, Some(91)),
            (u64::MAX, 2, None),
        ] {
            assert_eq!(lcm(a, b), expected, "lcm({a}, {b})");
        }
    }
}
