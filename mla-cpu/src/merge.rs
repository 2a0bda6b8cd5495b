//! Merges partial results, and converts log-sum-exps.

use rayon::prelude::*;

use super::Cpu;
use super::view::{Elements, Places, lse_elements, lse_places, with_element};
use mla_runtime::Result;
use mla_runtime::device::check_merge;
use mla_runtime::tensor::{LseConvention, LseLayout, LseMut, LseRef, TensorMut, TensorRef};

const ROWS_PER_TASK: usize = 64;

pub(crate) fn merge(
    cpu: &Cpu,
    out: TensorMut<'_, Cpu>,
    lse: LseMut<'_, Cpu>,
    other: TensorRef<'_, Cpu>,
    other_lse: LseRef<'_, Cpu>,
) -> Result<()> {
    let [tokens, heads, width] = out.shape();
    check_merge(&out, &lse, &other, &other_lse)?;
    // If there are no rows, the width may be anything. Without heads the number of tokens may be
    // anything, and vice versa.
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    with_element!(out.dtype(), T => {
        let other = Elements::<T>::of("other", &other)?;
        let out = Places::<T>::of("out", out)?;
        let lse = lse_places(lse)?;
        let other_lse = lse_elements(&other_lse)?;
        cpu.install(|| {
            (0..tokens * heads).into_par_iter().with_min_len(ROWS_PER_TASK).for_each_init(
                || (vec![0.0f32; width], vec![0.0f32; width]),
                |(row, addend), index| {
                    let (token, head) = (index / heads, index % heads);
                    let place = lse.at(head, token, 0);
                    // SAFETY: the contract of `Places::read`: each (token, head) is visited once,
                    // and the elements of the log-sum-exp and of the output are distinct.
                    let a = unsafe { lse.read(place) };
                    let b = other_lse.first(head, token);
                    let merged = Weights::of(a, b);
                    // SAFETY: the contract of `Places::write`: each (token, head) is visited once,
                    // as above.
                    unsafe { lse.write(place, merged.lse) };
                    // The output of a partial result that attended to nothing may hold anything, so
                    // it is not read.
                    let (has_a, has_b) = (!is_empty(a), !is_empty(b));
                    if merged.a == 1.0 && !has_b {
                        return;
                    }
                    row.fill(0.0);
                    if has_a {
                        // SAFETY: the contract of `Places::read_row`: each (token, head) is visited
                        // once, as above.
                        unsafe { out.read_row(token, head, row) };
                    }
                    addend.fill(0.0);
                    if has_b {
                        other.read_row(token, head, addend);
                    }
                    for (value, other) in row.iter_mut().zip(&*addend) {
                        *value = *value * merged.a + other * merged.b;
                    }
                    // SAFETY: the contract of `Places::write_row`: each (token, head) is visited
                    // once, as above.
                    unsafe { out.write_row(token, head, row) };
                },
            );
        });
    });
    Ok(())
}

// Returns true if a partial result attended to nothing.
fn is_empty(lse: f32) -> bool {
    lse.is_infinite()
}

// The log-sum-exp of two partial results, and the weight of each one's output.
struct Weights {
    lse: f32,
    a: f32,
    b: f32,
}

impl Weights {
    fn of(a: f32, b: f32) -> Self {
        let [a, b] = [a, b].map(|lse| {
            if is_empty(lse) {
                f32::NEG_INFINITY
            } else {
                lse
            }
        });
        if is_empty(a) && is_empty(b) {
            return Self {
                lse: f32::NEG_INFINITY,
                a: 0.0,
                b: 0.0,
            };
        }
        // If one of the two is NaN, `max` is the other number. The NaN then makes the whole result
        // NaN.
        let max = a.max(b);
        let (a, b) = ((a - max).exp(), (b - max).exp());
        let sum = a + b;
        Self {
            lse: max + sum.ln(),
            a: a / sum,
            b: b / sum,
        }
    }
}

pub(crate) fn convert_lse<C: LseConvention>(
    from: LseRef<'_, Cpu, C>,
    to: LseMut<'_, Cpu>,
) -> Result<()> {
    let LseLayout { heads, tokens, .. } = from.layout();
    to.layout().require("lse", heads, tokens)?;
    // A result without rows has nothing to read, and its extents may be anything.
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    let from = lse_elements(&from)?;
    let to = lse_places(to)?;
    for head in 0..heads {
        for token in 0..tokens {
            // SAFETY: the contract of `Places::write`: only this thread has the places, which it
            // borrowed mutably.
            unsafe { to.write(to.at(head, token, 0), from.first(head, token) * C::UNIT) };
        }
    }
    Ok(())
}
