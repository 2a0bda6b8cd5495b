//! How a model pairs the elements that it rotates.

/// Which elements of a rotary vector form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RotaryStyle {
    /// 2i and 2i + 1, as DeepSeek's own weights expect.
    Interleaved,
    /// i and i + R/2.
    Halves,
}
