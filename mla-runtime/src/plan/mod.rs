//! Planning a step: pure functions of lengths and dims, without a device.
//!
//! All arithmetic is checked: a quantity that does not fit is a [`PlanError`], never a panic or a
//! wrapped number.

pub mod context;
pub mod crossover;
mod error;
pub mod parallel;
pub mod slots;
pub mod split;
pub mod workspace;

pub use error::PlanError;

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
