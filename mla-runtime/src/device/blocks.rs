//! Matrices of e4m3 with a scale for each block, as checkpoints in block fp8 store them.

use std::ops::Range;

use crate::setters::copies;
use crate::tensor::{ArrayRef, Memory};
use crate::{Error, Result, check_range};

/// The number of rows, and of columns, in a block.
pub const BLOCK: usize = 128;

/// A matrix of e4m3 codes with an f32 scale for each block of 128 × 128: value = code · scale.
/// Checkpoints store the two as `weight` and `weight_scale_inv`. The last blocks along an axis may
/// be smaller.
#[non_exhaustive]
pub struct Fp8Blocks<'a, D: Memory> {
    codes: D::Bytes<'a>,
    scales: ArrayRef<'a, D, f32>,
    shape: [usize; 2],
    first_row: usize,
}

copies!([D: Memory] Fp8Blocks<'_, D>);

impl<'a, D: Memory> Fp8Blocks<'a, D> {
    /// A matrix from `weight`, `[rows, columns]` e4m3, a byte each, row by row, and
    /// `weight_scale_inv`, `[⌈rows/128⌉, ⌈columns/128⌉]`.
    ///
    /// # Errors
    ///
    /// If `weight` or `weight_scale_inv` does not have as many elements as the shape needs.
    pub fn new(
        weight: D::Bytes<'a>,
        weight_scale_inv: ArrayRef<'a, D, f32>,
        shape: [usize; 2],
    ) -> Result<Self> {
        Self::from_row(weight, weight_scale_inv, shape, 0)
    }

    /// A part of a matrix that begins at row `first_row` of a block, as a slice for tensor
    /// parallelism may. `weight_scale_inv` begins with the scales of that block: `[⌈(first_row +
    /// rows)/128⌉, ⌈columns/128⌉]`.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new). Also if a block has no row of this number.
    pub fn from_row(
        weight: D::Bytes<'a>,
        weight_scale_inv: ArrayRef<'a, D, f32>,
        shape: [usize; 2],
        first_row: usize,
    ) -> Result<Self> {
        let [rows, columns] = shape;
        if first_row >= BLOCK {
            let accepted = "0 to 127: a row of the first block";
            return Err(Error::argument("first_row", first_row, accepted));
        }
        let bytes = D::byte_len(weight);
        if rows.checked_mul(columns) != Some(bytes) {
            let accepted = format!("[{rows}, {columns}] e4m3, a byte each");
            return Err(Error::argument(
                "weight",
                format!("{bytes} bytes"),
                accepted,
            ));
        }
        let blocks = [first_row.saturating_add(rows), columns].map(|n| n.div_ceil(BLOCK));
        if blocks[0].checked_mul(blocks[1]) != Some(weight_scale_inv.len()) {
            return Err(Error::argument(
                "weight_scale_inv",
                format!("{} scales", weight_scale_inv.len()),
                format!("f32 {blocks:?}, one for each block of 128 × 128"),
            ));
        }
        Ok(Self {
            codes: weight,
            scales: weight_scale_inv,
            shape,
            first_row,
        })
    }

    /// These rows, with the scales of their blocks.
    ///
    /// # Errors
    ///
    /// If the range exceeds the rows.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        let [count, columns] = self.shape;
        check_range("rows", &rows, count)?;
        // Rows without columns take no memory, so their number has no limit.
        let [first, end] = [rows.start, rows.end].map(|row| self.first_row.saturating_add(row));
        let width = columns.div_ceil(BLOCK);
        let blocks = first / BLOCK..end.div_ceil(BLOCK).max(first / BLOCK);
        Ok(Self {
            codes: D::byte_range(self.codes, rows.start * columns..rows.end * columns),
            scales: self
                .scales
                .range(blocks.start * width..blocks.end * width)?,
            shape: [rows.len(), columns],
            first_row: first % BLOCK,
        })
    }

    /// The codes, row by row.
    pub fn codes(&self) -> D::Bytes<'a> {
        self.codes
    }

    /// The scales of the blocks, row by row.
    pub fn scales(&self) -> ArrayRef<'a, D, f32> {
        self.scales
    }

    /// The numbers of rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// The index of the first row within its block.
    pub fn first_row(&self) -> usize {
        self.first_row
    }
}
