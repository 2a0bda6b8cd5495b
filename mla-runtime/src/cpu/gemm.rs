//! Matrix products.

use gemm::Parallelism;
use rayon::prelude::*;

use super::Cpu;
use super::buffer::Scratch;
use super::view::{Elements, Lane as _, Places, with_element};
use crate::dtype::Element;
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef};

// The block of the result that one task computes. Fixed, so that nothing depends on how many
// threads there are; small enough that a block of each operand stays in the second-level cache.
const ROWS: usize = 128;
const COLUMNS: usize = 128;

pub(super) fn gemm(
    cpu: &Cpu,
    a: TensorRef<'_, Cpu>,
    b: TensorRef<'_, Cpu>,
    c: TensorMut<'_, Cpu>,
) -> Result<()> {
    let [batch, m, n] = c.shape();
    let k = a.shape()[2];
    a.layout().expect("gemm a", c.dtype(), [batch, m, k])?;
    b.layout().expect("gemm b", c.dtype(), [batch, k, n])?;
    with_element!(c.dtype(), T => {
        let a = Elements::<T>::of("gemm a", &a)?;
        let b = Elements::<T>::of("gemm b", &b)?;
        let c = Places::<T>::of("gemm c", c)?;
        blocks(cpu, a, b, c, k)
    })
}

// Blocks of operands are converted to f32, multiplied, and the result rounded once.
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
    cpu.install(|| {
        (0..batch * per_product).into_par_iter().try_for_each_init(
            Panels::default,
            |panels, block| {
                let product = block / per_product;
                // Neighbouring blocks share the columns of `b`, the larger operand by far.
                let column = block % per_product / row_blocks * COLUMNS;
                let row = block % row_blocks * ROWS;
                let (rows, columns) = (ROWS.min(m - row), COLUMNS.min(n - column));
                panels.reserve(rows * k, columns * k, rows * columns)?;
                let Panels {
                    a: left,
                    b: right,
                    c: result,
                } = panels;

                for (i, to) in left[..rows * k].chunks_exact_mut(k.max(1)).enumerate() {
                    a.read_row(product, row + i, to);
                }
                // `b` by rows or, where its columns are contiguous, by columns.
                let by_columns = b.strides[1] == 1 && b.strides[2] != 1;
                let right_strides = if by_columns { (k, 1) } else { (1, columns) };
                if by_columns {
                    for (j, to) in right[..columns * k].chunks_exact_mut(k.max(1)).enumerate() {
                        let from = product * b.strides[0] + (column + j) * b.strides[2];
                        f32::convert(&b.data[from..from + k], to);
                    }
                } else {
                    let part = b.columns(column, columns);
                    for (i, to) in right[..columns * k].chunks_exact_mut(columns).enumerate() {
                        part.read_row(product, i, to);
                    }
                }
                product_f32(
                    [rows, columns, k],
                    &mut result[..rows * columns],
                    (1, columns),
                    false,
                    &left[..rows * k],
                    (1, k),
                    &right[..columns * k],
                    right_strides,
                );
                let c = c.columns(column, columns);
                for (i, from) in result[..rows * columns].chunks_exact(columns).enumerate() {
                    // SAFETY: each block is computed once, and the elements of `c` are distinct.
                    unsafe { c.write_row(product, row + i, from) };
                }
                Ok(())
            },
        )
    })
}

struct Panels {
    a: Scratch<f32>,
    b: Scratch<f32>,
    c: Scratch<f32>,
}

impl Default for Panels {
    fn default() -> Self {
        Self {
            a: Scratch::empty(),
            b: Scratch::empty(),
            c: Scratch::empty(),
        }
    }
}

impl Panels {
    fn reserve(&mut self, a: usize, b: usize, c: usize) -> Result<()> {
        self.a.reserve(a)?;
        self.b.reserve(b)?;
        self.c.reserve(c)
    }
}

/// `c (+)= a · b` on this thread: `[m, k] · [k, n]`, strides given as (of columns, of rows).
///
/// # Panics
///
/// Where an operand is shorter than its shape and strides say.
#[expect(
    clippy::too_many_arguments,
    reason = "three operands, each with its strides"
)]
pub(super) fn product_f32(
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
    // SAFETY: every element that the shapes and strides name lies within its slice, as asserted;
    // `c` is borrowed exclusively, and the crate reads it only where told to.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            c_strides.0 as isize,
            c_strides.1 as isize,
            accumulate,
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
