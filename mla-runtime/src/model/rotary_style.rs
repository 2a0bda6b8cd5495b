//! The pairing of the elements that a model rotates.

/// The elements of a rotary vector that form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RotaryStyle {
    /// 2i and 2i + 1, as DeepSeek's own weights expect.
    Interleaved,
    /// i and i + R/2.
    Halves,
}
