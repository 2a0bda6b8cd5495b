//! The rotary embedding that a cache write applies on its way.

mod tables;

pub use self::tables::RotaryTables;
use crate::model::DType;
use crate::tensor::{ArrayRef, Memory, TensorMut, TensorRef};
use crate::{Error, Result};

use crate::model::RotaryStyle;

/// A rotation by position: pair `i` of a token at position `p` turns by the angle whose cosine and
/// sine are at `[0, p, i]` of the tables.
#[non_exhaustive]
pub struct Rotary<'a, D: Memory> {
    /// The position of each token: `[T]`. One outside the tables gives NaN, or an error on a device
    /// whose memory the host sees. `None`, for a layer or an indexer: what the prepared step says,
    /// of each request the tokens from kv − q on. A device needs them.
    pub positions: Option<ArrayRef<'a, D, i64>>,
    /// f32 `[1, positions, R/2]`.
    pub cos: TensorRef<'a, D>,
    /// f32 `[1, positions, R/2]`.
    pub sin: TensorRef<'a, D>,
    /// The pairing of elements.
    pub style: RotaryStyle,
}

impl<D: Memory> Clone for Rotary<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Memory> Copy for Rotary<'_, D> {}

impl<'a, D: Memory> Rotary<'a, D> {
    /// Tokens at these positions, or at those of a prepared step, by these tables.
    pub fn new(
        positions: impl Into<Option<ArrayRef<'a, D, i64>>>,
        [cos, sin]: [TensorRef<'a, D>; 2],
        style: RotaryStyle,
    ) -> Self {
        Self {
            positions: positions.into(),
            cos,
            sin,
            style,
        }
    }

    /// The same at positions of the caller's own, one for each of the step's tokens.
    #[must_use]
    pub fn with_positions(mut self, positions: ArrayRef<'a, D, i64>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// The same tables for elements that pair in another way.
    #[must_use]
    pub fn with_style(mut self, style: RotaryStyle) -> Self {
        self.style = style;
        self
    }

    /// The same views with a shorter lifetime.
    pub fn shorten<'short>(&self) -> Rotary<'short, D>
    where
        'a: 'short,
    {
        Rotary {
            positions: self.positions.as_ref().map(ArrayRef::shorten),
            cos: self.cos.shorten(),
            sin: self.sin.shorten(),
            style: self.style,
        }
    }

    /// The positions, which a device cannot do without.
    ///
    /// # Errors
    ///
    /// If there are none.
    pub fn positions(&self) -> Result<ArrayRef<'a, D, i64>> {
        let absent = || Error::argument("positions", "none", "one for each token");
        self.positions.ok_or_else(absent)
    }

    /// The rotation of some of the tokens.
    ///
    /// # Errors
    ///
    /// If there are no positions, or the range lies outside.
    pub fn tokens(&self, tokens: std::ops::Range<usize>) -> Result<Self> {
        Ok(self.with_positions(self.positions()?.range(tokens)?))
    }

    /// Refuses tables and positions in memory that the device's work must not access.
    pub(crate) fn check_memory(&self, device: &D) -> Result<()> {
        device.check_bytes("rotary.cos", self.cos.bytes())?;
        device.check_bytes("rotary.sin", self.sin.bytes())?;
        match &self.positions {
            Some(positions) => device.check_bytes("rotary.positions", positions.bytes()),
            None => Ok(()),
        }
    }

    /// The rotation of tokens at the caller's positions, or, if it has none, at these.
    pub(crate) fn at<'short>(&self, positions: ArrayRef<'short, D, i64>) -> Rotary<'short, D>
    where
        'a: 'short,
    {
        let rotary = self.shorten();
        rotary.with_positions(rotary.positions.unwrap_or(positions))
    }

    /// Refuses tables and positions that do not fit `tokens` vectors of `width` elements.
    ///
    /// # Errors
    ///
    /// If one does not fit.
    pub fn check(&self, tokens: usize, width: usize) -> Result<()> {
        if !width.is_multiple_of(2) {
            return Err(Error::argument("rope", width, "an even number of columns"));
        }
        check_positions(self.positions()?.len(), tokens)?;
        let (cos, sin) = (self.cos.layout(), self.sin.layout());
        let expected = [1, cos.shape[1], width / 2];
        for (name, table) in [("cos", cos), ("sin", sin)] {
            if table.dtype != DType::F32 || table.shape != expected || !table.has_unit_columns() {
                return Err(Error::argument(
                    name,
                    table,
                    format!("f32 {expected:?} with unit columns"),
                ));
            }
        }
        if cos.shape[1] > 1 && cos.strides[1] != sin.strides[1] {
            return Err(Error::argument(
                "sin",
                sin,
                format!("the strides of cos ({:?})", cos.strides),
            ));
        }
        Ok(())
    }
}

/// Refuses positions of other tokens than the step's.
pub(crate) fn check_positions(given: usize, tokens: usize) -> Result<()> {
    if given == tokens {
        return Ok(());
    }
    let accepted = format!("{tokens}, one for each token");
    Err(Error::argument("positions", given, accepted))
}

/// The rotary parts of the queries, which are rotated with the keys.
pub enum RotaryQuery<'a, D: Memory> {
    /// `[T, H, R]`, turned in place.
    InPlace(TensorMut<'a, D>),
    /// `[T, H, R]` each.
    Into {
        /// The queries that are rotated.
        from: TensorRef<'a, D>,
        /// The destination of the result.
        to: TensorMut<'a, D>,
    },
}
