//! The rotary embedding that a cache write applies to keys and queries.

mod tables;

pub use self::tables::RotaryTables;
use crate::model::DType;
use crate::setters::copies;
use crate::tensor::{ArrayRef, Memory, TensorRef};
use crate::{Error, Result, check_len};

use crate::model::RotaryStyle;

/// A rotation by position. Pair `i` of a token at position `p` turns by an angle whose cosine and
/// sine are at `[0, p, i]` of the tables.
#[non_exhaustive]
pub struct Rotary<'a, D: Memory> {
    /// The position of each token: `[T]`. A position outside the tables gives NaN, or an error on a
    /// device whose memory the host can read. A layer or an indexer also accepts `None`: the
    /// positions are then those of the prepared step, for each request from kv − q on. A device
    /// needs positions.
    pub positions: Option<ArrayRef<'a, D, i64>>,
    /// f32 `[1, positions, R/2]`.
    pub cos: TensorRef<'a, D>,
    /// f32 `[1, positions, R/2]`.
    pub sin: TensorRef<'a, D>,
    /// The pairing of rotary elements.
    pub style: RotaryStyle,
}

copies!([D: Memory] Rotary<'_, D>);

impl<'a, D: Memory> Rotary<'a, D> {
    /// A rotation by these tables. Without positions, those of a prepared step apply.
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

    /// The same rotation with the caller's positions, one for each of the step's tokens.
    #[must_use]
    pub fn with_positions(mut self, positions: ArrayRef<'a, D, i64>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// The same rotation with another pairing of elements.
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

    /// The positions, which an operation of a device needs.
    ///
    /// # Errors
    ///
    /// If there are no positions.
    pub fn positions(&self) -> Result<ArrayRef<'a, D, i64>> {
        let absent = || Error::argument("positions", "none", "one for each token");
        self.positions.ok_or_else(absent)
    }

    /// The rotation of the tokens in a range.
    ///
    /// # Errors
    ///
    /// If there are no positions, or if the range exceeds them.
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

    /// The rotation with the caller's positions if it has any, and otherwise with these.
    pub(crate) fn at<'short>(&self, positions: ArrayRef<'short, D, i64>) -> Rotary<'short, D>
    where
        'a: 'short,
    {
        let rotary = self.shorten();
        rotary.with_positions(rotary.positions.unwrap_or(positions))
    }

    /// Checks that tables and positions fit `tokens` vectors of `width` elements.
    ///
    /// # Errors
    ///
    /// If a table or the positions do not fit.
    pub fn check(&self, tokens: usize, width: usize) -> Result<()> {
        if !width.is_multiple_of(2) {
            return Err(Error::argument("rope", width, "an even number of columns"));
        }
        check_len(
            "positions",
            self.positions()?.len(),
            tokens,
            "one for each token",
        )?;
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
