//! Strided copies.

use rayon::prelude::*;

use super::view::{Elements, Places, scalars, with_element};
use super::{Cpu, fp8};
use mla_runtime::Result;
use mla_runtime::device::{BLOCK, Fp8Blocks, check_scatter};
use mla_runtime::model::Element;
use mla_runtime::tensor::{ArrayRef, TensorMut, TensorRef};

// The number of elements per task: enough work to outweigh the cost of passing a task to a thread.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// Copies row n of `from` to row `places[n]` of `to`.
pub(crate) fn scatter_rows(
    from: TensorRef<'_, Cpu>,
    places: ArrayRef<'_, Cpu, i64>,
    to: TensorMut<'_, Cpu>,
) -> Result<()> {
    let [last, heads, _] = to.shape();
    check_scatter(&from, &places, &to)?;
    // A tensor without elements may have any extents and strides.
    if to.layout().elements() == 0 {
        return Ok(());
    }
    let places = scalars("places", &places)?;
    with_element!(to.dtype(), T => {
        let from = Elements::<T>::of("rows to copy", &from)?;
        let to = Places::<T>::of("destination", to)?;
        let inside = |place: &i64| usize::try_from(*place).ok().filter(|place| *place < last);
        for (row, place) in places.iter().enumerate() {
            let Some(place) = inside(place) else { continue };
            for head in 0..heads {
                // SAFETY: the contract of `copy_row`: only this thread has the output, which it
                // borrowed mutably.
                unsafe { copy_row(&from, [row, head], &to, [place, head]) };
            }
        }
    });
    Ok(())
}

/// Writes the values of a matrix in block fp8.
pub(crate) fn dequantize_blocks(
    cpu: &Cpu,
    from: Fp8Blocks<'_, Cpu>,
    to: TensorMut<'_, Cpu>,
) -> Result<()> {
    let [count, columns] = from.shape();
    to.layout()
        .require("dequantized matrix", to.dtype(), [1, count, columns])?;
    let scales = scalars("weight_scale_inv", &from.scales())?;
    let (codes, width) = (from.codes(), columns.div_ceil(BLOCK));
    with_element!(to.dtype(), T => {
        let to = Places::<T>::of("dequantized matrix", to)?;
        rows(cpu, to, |i, row| {
            let scales = &scales[(from.first_row() + row) / BLOCK * width..][..width];
            let codes = &codes[row * columns..][..columns];
            for (column, code) in codes.iter().enumerate() {
                let value = fp8::decode(*code) * scales[column / BLOCK];
                // SAFETY: the contract of `Places::write`: each row is visited once, and the
                // elements of an output are distinct.
                unsafe { to.write(to.at(i, row, column), T::from_f32(value)) };
            }
        });
    });
    Ok(())
}

pub(crate) fn copy(cpu: &Cpu, from: TensorRef<'_, Cpu>, to: TensorMut<'_, Cpu>) -> Result<()> {
    from.layout()
        .require("copy source", to.dtype(), to.shape())?;
    with_element!(to.dtype(), T => {
        let from = Elements::<T>::of("copy source", &from)?;
        let to = Places::<T>::of("destination", to)?;
        // SAFETY: the contract of `copy_row`: each row is visited once, and the elements of an
        // output are distinct.
        rows(cpu, to, |i, j| unsafe { copy_row(&from, [i, j], &to, [i, j]) });
    });
    Ok(())
}

pub(crate) fn clear(cpu: &Cpu, to: TensorMut<'_, Cpu>) -> Result<()> {
    with_element!(to.dtype(), T => {
        let to = Places::<T>::of("destination", to)?;
        rows(cpu, to, |i, j| {
            for k in 0..to.shape[2] {
                // SAFETY: the contract of `Places::write`: each row is visited once, and the
                // elements of an output are distinct.
                unsafe { to.write(to.at(i, j, k), bytemuck::Zeroable::zeroed()) };
            }
        });
    });
    Ok(())
}

/// Copies a row of one tensor to a row of another, which has the same width.
///
/// # Safety
///
/// Nothing else reads or writes the row of `to` at the same time.
unsafe fn copy_row<T: Element>(
    from: &Elements<'_, T>,
    [i, j]: [usize; 2],
    to: &Places<'_, T>,
    [to_i, to_j]: [usize; 2],
) {
    let (width, start) = (to.shape[2], from.at(i, j));
    if from.strides[2] == 1 && to.strides[2] == 1 {
        // SAFETY: the contract of `Places::slice`, which is this function's own.
        let row = unsafe { to.slice(to.at(to_i, to_j, 0), width) };
        row.copy_from_slice(&from.data[start..start + width]);
        return;
    }
    for k in 0..width {
        // SAFETY: the contract of `Places::write`, which is this function's own.
        unsafe { to.write(to.at(to_i, to_j, k), from.data[start + k * from.strides[2]]) };
    }
}

// Calls `work` once for every row of a tensor that is not empty.
fn rows<T: Element>(cpu: &Cpu, to: Places<'_, T>, work: impl Fn(usize, usize) + Sync) {
    let [outer, inner, width] = to.shape;
    if width == 0 {
        return;
    }
    cpu.install(|| {
        (0..outer * inner)
            .into_par_iter()
            .with_min_len(ELEMENTS_PER_TASK.div_ceil(width))
            .for_each(|row| work(row / inner, row % inner));
    });
}
