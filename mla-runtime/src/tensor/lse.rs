//! The log-sum-exp of attention, with its convention as part of the type.
//!
//! Partial results are merged by their log-sum-exp. Kernel libraries write it in different
//! conventions: base e or base 2, `[heads, tokens]` or `[tokens, heads]`. A mix-up gives plausible
//! but wrong numbers. For this reason the convention is a type parameter. Everything between a
//! backend and the layer is [`Natural`].

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::setters::copies;
use crate::tensor::{Memory, check_alignment};
use crate::{Error, Result, check_range};

/// The convention in which log-sum-exps are written.
pub trait LseConvention: Copy + Send + Sync + 'static {
    /// The natural logarithm that corresponds to one unit: 1 for base e, ln 2 for base 2.
    const UNIT: f32;
    /// True for `[heads, tokens]`, false for `[tokens, heads]`.
    const HEADS_FIRST: bool;
}

/// Natural logarithm, f32, `[heads, tokens]`. The value is −inf where a row attends to nothing.
#[derive(Clone, Copy, Debug)]
pub enum Natural {}

impl LseConvention for Natural {
    const UNIT: f32 = 1.0;
    const HEADS_FIRST: bool = true;
}

/// Base 2, f32, `[tokens, heads]`, as several kernel libraries write it.
#[derive(Clone, Copy, Debug)]
pub enum Base2TokensFirst {}

impl LseConvention for Base2TokensFirst {
    const UNIT: f32 = std::f32::consts::LN_2;
    const HEADS_FIRST: bool = false;
}

/// The extents of a log-sum-exp, and the distance between its rows. A row is a head if the
/// convention has heads first, and a token otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LseLayout {
    /// H.
    pub heads: usize,
    /// T.
    pub tokens: usize,
    /// The distance between two rows, in elements.
    pub row_stride: usize,
}

impl LseLayout {
    /// `[heads, tokens]` without gaps.
    pub const fn heads_first(heads: usize, tokens: usize) -> Self {
        Self {
            heads,
            tokens,
            row_stride: tokens,
        }
    }

    /// Checks the extents that a backend relies on.
    ///
    /// # Errors
    ///
    /// If the numbers of heads or tokens differ. The error calls the log-sum-exp `field`.
    pub fn require(&self, field: &'static str, heads: usize, tokens: usize) -> Result<()> {
        if (self.heads, self.tokens) == (heads, tokens) {
            return Ok(());
        }
        let accepted = format!("{heads} heads of {tokens} tokens");
        Err(Error::argument(field, self, accepted))
    }

    /// The part with the tokens in `range`, and the offset of its first byte.
    fn narrowed<C: LseConvention>(&self, range: Range<usize>) -> Result<(Self, usize)> {
        check_range("token range", &range, self.tokens)?;
        let part = Self {
            tokens: range.len(),
            ..*self
        };
        // An empty part begins where the whole begins. The whole may have fewer bytes than the
        // offset.
        let offset = match (part.heads * part.tokens, C::HEADS_FIRST) {
            (0, _) => 0,
            (_, true) => range.start,
            (_, false) => range.start * self.row_stride,
        };
        Ok((part, offset * size_of::<f32>()))
    }

    /// The numbers of rows and columns.
    fn extents<C: LseConvention>(&self) -> (usize, usize) {
        match C::HEADS_FIRST {
            true => (self.heads, self.tokens),
            false => (self.tokens, self.heads),
        }
    }

    // The stride of a single row may be anything, since no second row follows. It is replaced by
    // one that fits into the 63 bits of the C interface.
    fn settled<C: LseConvention>(mut self) -> Self {
        let (rows, columns) = self.extents::<C>();
        if rows <= 1 {
            self.row_stride = columns;
        }
        self
    }

    fn check<C: LseConvention>(&self, available: usize) -> Result<()> {
        let (rows, columns) = self.extents::<C>();
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let end = (rows - 1)
            .checked_mul(self.row_stride)
            .and_then(|last| last.checked_add(columns))
            .and_then(|elements| elements.checked_mul(size_of::<f32>()));
        match end {
            Some(bytes) if bytes <= available && (rows == 1 || self.row_stride >= columns) => {
                Ok(())
            }
            _ => Err(Error::argument(
                "lse layout",
                self,
                format!("rows that do not overlap and lie within {available} bytes"),
            )),
        }
    }
}

impl fmt::Display for LseLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} heads of {} tokens, rows {} apart",
            self.heads, self.tokens, self.row_stride
        )
    }
}

/// A view of a log-sum-exp for reading.
pub struct LseRef<'a, D: Memory, C: LseConvention = Natural> {
    bytes: D::Bytes<'a>,
    layout: LseLayout,
    convention: PhantomData<C>,
}

copies!([D: Memory, C: LseConvention] LseRef<'_, D, C>);

impl<D: Memory, C: LseConvention> fmt::Debug for LseRef<'_, D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LseRef({:?})", self.layout)
    }
}

impl<'a, D: Memory, C: LseConvention> LseRef<'a, D, C> {
    /// A view whose first element is at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// If an element lies outside `bytes`, if `bytes` is not aligned for f32, or if rows overlap.
    pub fn new(bytes: D::Bytes<'a>, layout: LseLayout) -> Result<Self> {
        layout.check::<C>(D::byte_len(bytes))?;
        let layout = layout.settled::<C>();
        check_alignment::<D>(bytes, size_of::<f32>())?;
        Ok(Self {
            bytes,
            layout,
            convention: PhantomData,
        })
    }

    /// The bytes, beginning at the first element.
    pub fn bytes(&self) -> D::Bytes<'a> {
        self.bytes
    }

    /// The extents and the row stride.
    pub fn layout(&self) -> LseLayout {
        self.layout
    }

    /// The part of the tokens in `range`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the tokens.
    pub fn tokens(&self, range: Range<usize>) -> Result<Self> {
        let (layout, offset) = self.layout.narrowed::<C>(range)?;
        Ok(Self {
            bytes: D::byte_range(self.bytes, offset..D::byte_len(self.bytes)),
            layout,
            convention: PhantomData,
        })
    }
}

/// A view of a log-sum-exp for writing.
pub struct LseMut<'a, D: Memory, C: LseConvention = Natural> {
    pub(super) bytes: D::BytesMut<'a>,
    layout: LseLayout,
    convention: PhantomData<C>,
}

impl<D: Memory, C: LseConvention> fmt::Debug for LseMut<'_, D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LseMut({:?})", self.layout)
    }
}

impl<'a, D: Memory, C: LseConvention> LseMut<'a, D, C> {
    /// A view whose first element is at the first of `bytes`.
    ///
    /// # Errors
    ///
    /// If an element lies outside `bytes`, if `bytes` is not aligned for f32, or if rows overlap.
    pub fn new(bytes: D::BytesMut<'a>, layout: LseLayout) -> Result<Self> {
        layout.check::<C>(D::byte_len_mut(&bytes))?;
        let layout = layout.settled::<C>();
        check_alignment::<D>(D::freeze(&bytes), size_of::<f32>())?;
        Ok(Self {
            bytes,
            layout,
            convention: PhantomData,
        })
    }

    /// The bytes, beginning at the first element.
    pub fn into_bytes(self) -> D::BytesMut<'a> {
        self.bytes
    }

    /// The extents and the row stride.
    pub fn layout(&self) -> LseLayout {
        self.layout
    }

    /// The part of the tokens in `range`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the tokens.
    pub fn tokens(self, range: Range<usize>) -> Result<Self> {
        let (layout, offset) = self.layout.narrowed::<C>(range)?;
        let (_, bytes) = D::split_mut(self.bytes, offset);
        Ok(Self {
            bytes,
            layout,
            convention: PhantomData,
        })
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> LseMut<'_, D, C> {
        LseMut {
            bytes: D::reborrow(&mut self.bytes),
            layout: self.layout,
            convention: PhantomData,
        }
    }

    /// The same view for reading.
    pub fn as_ref(&self) -> LseRef<'_, D, C> {
        LseRef {
            bytes: D::freeze(&self.bytes),
            layout: self.layout,
            convention: PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_tokens_begins_where_its_first_does() {
        let layout = LseLayout {
            heads: 3,
            tokens: 5,
            row_stride: 8,
        };
        let part = |range| layout.narrowed::<Natural>(range).unwrap();
        assert_eq!((part(2..5).0.tokens, part(2..5).1), (3, 8));
        assert_eq!((part(5..5).0.tokens, part(5..5).1), (0, 0));
        let (_, offset) = layout.narrowed::<Base2TokensFirst>(2..3).unwrap();
        assert_eq!(offset, 2 * 8 * 4);
        let error = layout.narrowed::<Natural>(4..6).unwrap_err();
        assert_eq!(
            error.to_string(),
            "token range: given 4..6, accepted within 0..5"
        );
    }
}
