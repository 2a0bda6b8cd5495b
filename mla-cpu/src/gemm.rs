//! Matrix products.

use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

use super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::Instructions;
use super::buffer::Scratch;
#[cfg(target_arch = "x86_64")]
use super::dots::{Pairs, Singles};
use super::transpose::transpose;
use super::view::{Elements, Lane as _, Places, with_element};
use mla_runtime::device::check_product;
#[cfg(target_arch = "x86_64")]
use mla_runtime::model::DType;
use mla_runtime::model::Element;
use mla_runtime::tensor::{TensorMut, TensorRef};
use mla_runtime::{Error, Result};

// The block of the result that one task computes. Its size is fixed, so that no result depends on
// the number of threads. A block of each operand fits into the second-level cache.
const ROWS: usize = 128;
const COLUMNS: usize = 128;

// The maximum number of rows of `a` for which the `gemm` crate reads contiguous columns of `b` in
// place. For more rows it would rearrange them one element at a time, so they are first copied to
// rows.
const FEW_ROWS: usize = 2;

// The `gemm` crate uses special orders of summation for products of one row or one column, of at
// most two entries, or of at most 256 results. Products of more than 512 entries are summed in
// parts that depend on the number of rows. The bits of a row would then depend on the other rows.
// Operands are therefore padded with zeros, and longer ones are multiplied in parts.
const MIN_ENTRIES: usize = 3;
const MIN_COLUMNS: usize = 2;
const MAX_FEW: usize = 256;
const MAX_ENTRIES: usize = 512;

// The number of columns of `b`, and of entries of each, that are transposed at a time. They fit
// into the first-level cache.
const STRIP: [usize; 2] = [16, 256];

pub(crate) fn gemm(
    cpu: &Cpu,
    a: TensorRef<'_, Cpu>,
    b: TensorRef<'_, Cpu>,
    c: TensorMut<'_, Cpu>,
) -> Result<()> {
    check_product(&a, &b, &c)?;
    let k = a.shape()[2];
    // A result without elements may have any extents. So may operands that repeat an element.
    if c.layout().elements() == 0 {
        return Ok(());
    }
    if k > isize::MAX as usize / (ROWS.max(COLUMNS) * size_of::<f32>()) {
        return Err(Error::argument(
            "gemm a",
            a.layout(),
            "an inner axis that can be summed",
        ));
    }
    with_element!(c.dtype(), T => {
        let a = Elements::<T>::of("gemm a", &a)?;
        let b = Elements::<T>::of("gemm b", &b)?;
        let c = Places::<T>::of("gemm c", c)?;
        blocks(cpu, a, b, c, k)
    })
}

// Computes the blocks of the result. Each element is summed in f32 and rounded once.
fn blocks<T: Element>(
    cpu: &Cpu,
    a: Elements<'_, T>,
    b: Elements<'_, T>,
    c: Places<'_, T>,
    k: usize,
) -> Result<()> {
    let [batch, m, n] = c.shape;
    let (row_blocks, column_blocks) = (m.div_ceil(ROWS), n.div_ceil(COLUMNS));
    let per_product = row_blocks * column_blocks;
    #[cfg(target_arch = "x86_64")]
    let dots = Dots::of(cpu, &a, &b, k);
    cpu.install(|| {
        (0..batch * per_product).into_par_iter().try_for_each_init(
            Panels::default,
            |panels, index| {
                // Consecutive blocks share columns of `b`, which is by far the larger operand.
                let column = index % per_product / row_blocks * COLUMNS;
                let row = index % row_blocks * ROWS;
                let block = Block {
                    product: index / per_product,
                    row,
                    column,
                    size: [ROWS.min(m - row), COLUMNS.min(n - column), k],
                };
                #[cfg(target_arch = "x86_64")]
                let pitch = match dots {
                    Some(dots) => dots.multiply(&a, &b, &block, panels)?,
                    None => multiply(&a, &b, &block, panels)?,
                };
                #[cfg(not(target_arch = "x86_64"))]
                let pitch = multiply(&a, &b, &block, panels)?;
                let [rows, columns, _] = block.size;
                let c = c.columns(column, columns);
                let results = panels.c[..rows * pitch].chunks_exact(pitch);
                for (i, from) in results.enumerate() {
                    // SAFETY: each block is computed once, and the elements of `c` are distinct.
                    unsafe { c.write_row(block.product, row + i, &from[..columns]) };
                }
                Ok(())
            },
        )
    })
}

// The rows and columns of the result that one task computes.
struct Block {
    product: usize,
    row: usize,
    column: usize,
    // The numbers of rows and of columns, and the inner dimension.
    size: [usize; 3],
}

// Computes a block with the `gemm` crate, after a conversion of the operands to f32. Returns the
// distance between rows of results.
fn multiply<T: Element>(
    a: &Elements<'_, T>,
    b: &Elements<'_, T>,
    block: &Block,
    panels: &mut Panels,
) -> Result<usize> {
    let columns = block.size[1].max(MIN_COLUMNS);
    let rows = block.size[0].max(MAX_FEW / columns + 1);
    let k = block.size[2].max(MIN_ENTRIES);
    panels.reserve(rows * k, columns * k, rows * columns)?;
    let left = &mut panels.a[..rows * k];
    read_rows(a, block, k, left);
    let right = &mut panels.b[..columns * k];
    let right_strides = read_columns(&b.columns(block.column, block.size[1]), block, right);
    product_f32(
        [rows, columns, k],
        &mut panels.c[..rows * columns],
        (1, columns),
        false,
        left,
        (1, k),
        right,
        right_strides,
    );
    Ok(columns)
}

// Reads the rows of a block, `pitch` apart, and pads them with zeros.
fn read_rows<T: Element>(a: &Elements<'_, T>, block: &Block, pitch: usize, to: &mut [f32]) {
    let [rows, _, k] = block.size;
    for (i, to) in to.chunks_exact_mut(pitch.max(1)).enumerate() {
        let (to, rest) = to.split_at_mut(if i < rows { k } else { 0 });
        if i < rows {
            a.read_row(block.product, block.row + i, to);
        }
        rest.fill(0.0);
    }
}

// Dot products for a `b` with contiguous columns, such as weights `[out, in]`: in f32, or in bf16
// without a conversion.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum Dots {
    Singles(Singles),
    Pairs(Pairs),
}

#[cfg(target_arch = "x86_64")]
impl Dots {
    fn of<T: Element>(
        cpu: &Cpu,
        a: &Elements<'_, T>,
        b: &Elements<'_, T>,
        k: usize,
    ) -> Option<Self> {
        if k == 0 || !cpu.takes(Instructions::Vectors) || b.strides[1] != 1 || b.strides[2] == 1 {
            return None;
        }
        if T::DTYPE == DType::BF16
            && a.strides[2] == 1
            && k.is_multiple_of(2)
            && let Some(pairs) = Pairs::new()
        {
            return Some(Self::Pairs(pairs));
        }
        Singles::new().map(Self::Singles)
    }

    fn multiply<T: Element>(
        self,
        a: &Elements<'_, T>,
        b: &Elements<'_, T>,
        block: &Block,
        panels: &mut Panels,
    ) -> Result<usize> {
        let [rows, columns, k] = block.size;
        let row = |i: usize| &a.data[a.at(block.product, block.row + i)..][..k];
        let column = |j: usize| {
            let at = block.product * b.strides[0] + (block.column + j) * b.strides[2];
            &b.data[at..at + k]
        };
        let copied = match (self, T::DTYPE) {
            (Self::Pairs(_), _) | (_, DType::F32) => 0,
            _ => k,
        };
        panels.reserve(rows * k, columns * copied, rows * columns)?;
        let sums = &mut panels.c[..rows * columns];
        sums.fill(0.0);
        match self {
            Self::Pairs(pairs) => {
                let rows = list(rows, |i| bytemuck::cast_slice(row(i)));
                let columns = list(columns, |j| bytemuck::cast_slice(column(j)));
                pairs.add(&rows, &columns, sums, block.size[1]);
            }
            Self::Singles(singles) => {
                let left = &mut panels.a[..rows * k];
                read_rows(a, block, k, left);
                let right = &mut panels.b[..columns * copied];
                for (j, to) in right.chunks_exact_mut(k.max(1)).enumerate() {
                    f32::convert(column(j), to);
                }
                let rows = list(rows, |i| &left[i * k..(i + 1) * k]);
                let columns = list(columns, |j| match copied {
                    0 => bytemuck::cast_slice(column(j)),
                    _ => &right[j * k..(j + 1) * k],
                });
                singles.add(&rows, &columns, sums, block.size[1]);
            }
        }
        Ok(block.size[1])
    }
}

#[cfg(target_arch = "x86_64")]
fn list<'a, S>(count: usize, row: impl Fn(usize) -> &'a [S]) -> Vec<&'a [S]> {
    (0..count).map(row).collect()
}

// Copies a block of `b` to `to` and pads it with zeros. The copy is column-major if the columns are
// contiguous and few rows are multiplied, and row-major otherwise. Returns the strides of columns
// and of rows in `to`.
fn read_columns<T: Element>(b: &Elements<'_, T>, block: &Block, to: &mut [f32]) -> (usize, usize) {
    let [rows, columns, k] = block.size;
    let (pitch, product) = (columns.max(MIN_COLUMNS), block.product);
    let depth = to.len() / pitch;
    if [pitch, depth] != [columns, k] {
        to.fill(0.0);
    }
    if b.strides[1] != 1 || b.strides[2] == 1 {
        for (i, to) in to.chunks_exact_mut(pitch).take(k).enumerate() {
            b.read_row(product, i, &mut to[..columns]);
        }
        return (1, pitch);
    }
    let column = |j: usize, part: Range<usize>| {
        let from = product * b.strides[0] + j * b.strides[2];
        &b.data[from + part.start..from + part.end]
    };
    if rows <= FEW_ROWS {
        for (j, to) in to.chunks_exact_mut(depth).take(columns).enumerate() {
            f32::convert(column(j, 0..k), &mut to[..k]);
        }
        return (depth, 1);
    }
    let mut strip = [0.0; STRIP[0] * STRIP[1]];
    for first in (0..columns).step_by(STRIP[0]) {
        let count = STRIP[0].min(columns - first);
        for start in (0..k).step_by(STRIP[1]) {
            let part = start..k.min(start + STRIP[1]);
            for (j, strip) in strip.chunks_exact_mut(STRIP[1]).take(count).enumerate() {
                f32::convert(column(first + j, part.clone()), strip);
            }
            let to = &mut to[start * pitch + first..];
            transpose([count, part.len()], &strip, STRIP[1], to, pitch);
        }
    }
    (1, pitch)
}

#[derive(Default)]
struct Panels {
    a: Scratch<f32>,
    b: Scratch<f32>,
    c: Scratch<f32>,
}

impl Panels {
    fn reserve(&mut self, a: usize, b: usize, c: usize) -> Result<()> {
        self.a.reserve(a)?;
        self.b.reserve(b)?;
        self.c.reserve(c)
    }
}

/// Computes `c (+)= a · b` on this thread, `[m, k] · [k, n]`. Strides are given as (column stride,
/// row stride).
///
/// # Panics
///
/// If an operand is too short for its shape and strides.
#[expect(
    clippy::too_many_arguments,
    reason = "three operands, each with its strides"
)]
pub(crate) fn product_f32(
    [m, n, k]: [usize; 3],
    c: &mut [f32],
    c_strides: (usize, usize),
    accumulate: bool,
    a: &[f32],
    a_strides: (usize, usize),
    b: &[f32],
    b_strides: (usize, usize),
) {
    if m == 0 || n == 0 {
        return;
    }
    let end = |rows: usize, columns: usize, strides: (usize, usize)| {
        if rows == 0 || columns == 0 {
            return 0;
        }
        (rows - 1) * strides.1 + (columns - 1) * strides.0 + 1
    };
    assert!(end(m, n, c_strides) <= c.len());
    assert!(end(m, k, a_strides) <= a.len());
    assert!(end(k, n, b_strides) <= b.len());
    // All parts have about the same length, so that a part has few entries only if all have.
    let part = k.div_ceil(k.div_ceil(MAX_ENTRIES).max(1)).max(1);
    for start in (0..k.max(1)).step_by(part) {
        let (a, b) = (&a[start * a_strides.0..], &b[start * b_strides.1..]);
        // SAFETY: every element that the shapes and strides name lies within its slice, as
        // asserted; `c` is borrowed exclusively, and the crate reads it only if told to.
        unsafe {
            gemm::gemm(
                m,
                n,
                part.min(k - start),
                c.as_mut_ptr(),
                c_strides.0 as isize,
                c_strides.1 as isize,
                accumulate || start > 0,
                a.as_ptr(),
                a_strides.0 as isize,
                a_strides.1 as isize,
                b.as_ptr(),
                b_strides.0 as isize,
                b_strides.1 as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}
