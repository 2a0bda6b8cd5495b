//! Merging of partial results, and conversion of log-sum-exps.

use rayon::prelude::*;

use super::Cpu;
use super::view::{Elements, LseValues, Places, lse_places, with_element};
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
    // Memory does not bound the width of a result without rows, nor tokens without heads, nor heads
    // without tokens.
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    with_element!(out.dtype(), T => {
        let other = Elements::<T>::of("other", &other)?;
        let out = Places::<T>::of("out", out)?;
        let lse = lse_places(lse)?;
        let other_lse = LseValues::of(&other_lse)?;
        cpu.install(|| {
            (0..tokens * heads).into_par_iter().with_min_len(ROWS_PER_TASK).for_each_init(
                || (vec![0.0f32; width], vec![0.0f32; width]),
                |(row, addend), index| {
                    let (token, head) = (index / heads, index % heads);
                    let place = lse.at(head, token, 0);
                    // SAFETY: the contract of `Places::read`: each (token, head) is visited once,
                    // and the elements of the log-sum-exp and of the output are distinct.
                    let a = unsafe { lse.read(place) };
                    let b = other_lse.get(head, token);
                    let merged = Weights::of(a, b);
                    // SAFETY: the contract of `Places::write`, in the same way.
                    unsafe { lse.write(place, merged.lse) };
                    // A result that attended to nothing is not read: it may hold anything.
                    let (has_a, has_b) = (!is_empty(a), !is_empty(b));
                    if merged.a == 1.0 && !has_b {
                        return;
                    }
                    row.fill(0.0);
                    if has_a {
                        // SAFETY: the contract of `Places::read_row`, in the same way.
                        unsafe { out.read_row(token, head, row) };
                    }
                    addend.fill(0.0);
                    if has_b {
                        other.read_row(token, head, addend);
                    }
                    for (value, other) in row.iter_mut().zip(&*addend) {
                        *value = *value * merged.a + other * merged.b;
                    }
                    // SAFETY: the contract of `Places::write_row`, in the same way.
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
        // The maximum is the number if one is NaN: the other then makes everything NaN.
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
    // A result without rows has nothing to read, and its extents may be of any size.
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    let from = LseValues::of(&from)?;
    let to = lse_places(to)?;
    for head in 0..heads {
        for token in 0..tokens {
            // SAFETY: the contract of `Places::write`: this thread alone has the places, which
            // it borrowed mutably.
            unsafe { to.write(to.at(head, token, 0), from.get(head, token) * C::UNIT) };
        }
    }
    Ok(())
}
