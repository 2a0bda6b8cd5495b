//! The pairing of rotary elements.

/// The elements of a rotary vector that form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RotaryStyle {
    /// Elements 2i and 2i + 1, as DeepSeek's own weights expect.
    Interleaved,
    /// Elements i and i + R/2.
    Halves,
}
