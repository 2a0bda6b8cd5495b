//! Factors of outputs, from sinks and gates.

use rayon::prelude::*;

use super::Cpu;
use super::view::{Elements, Places, lse_elements, scalars, with_element};
use mla_runtime::Result;
use mla_runtime::device::check_outputs;
use mla_runtime::tensor::{ArrayRef, LseRef, TensorMut, TensorRef};

const ROWS_PER_TASK: usize = 64;

/// Returns the factor that a sink leaves for an output. An output that attended to nothing stays 0.
/// If the log-sum-exp is NaN, the result is NaN.
pub(crate) fn left_by_sink(sink: f32, lse: f32) -> f32 {
    match lse > f32::NEG_INFINITY {
        true => 1.0 / (1.0 + (sink - lse).exp()),
        false => 1.0,
    }
}

pub(crate) fn scale(
    cpu: &Cpu,
    out: TensorMut<'_, Cpu>,
    sinks: Option<(ArrayRef<'_, Cpu, f32>, LseRef<'_, Cpu>)>,
    gate: Option<TensorRef<'_, Cpu>>,
) -> Result<()> {
    check_outputs(&out, sinks.as_ref(), gate.as_ref())?;
    let [tokens, heads, width] = out.shape();
    // A tensor without elements may have any extents.
    if out.layout().elements() == 0 {
        return Ok(());
    }
    let sinks = match &sinks {
        None => None,
        Some((sinks, lse)) => Some((scalars("sinks", sinks)?, lse_elements(lse)?)),
    };
    with_element!(out.dtype(), T => {
        let out = Places::<T>::of("out", out)?;
        let gate = gate.as_ref().map(|gate| Elements::<T>::of("gate", gate)).transpose()?;
        cpu.install(|| {
            (0..tokens * heads).into_par_iter().with_min_len(ROWS_PER_TASK).for_each_init(
                || (vec![0.0f32; width], vec![0.0f32; width]),
                |(row, gates), index| {
                    let (token, head) = (index / heads, index % heads);
                    let left = sinks.map_or(1.0, |(sinks, lse)| {
                        left_by_sink(sinks[head], lse.first(head, token))
                    });
                    // SAFETY: the contract of `Places::read_row`: each (token, head) is visited
                    // once, and the elements of the output are distinct.
                    unsafe { out.read_row(token, head, row) };
                    row.iter_mut().for_each(|value| *value *= left);
                    if let Some(gate) = &gate {
                        gate.read_row(token, head, gates);
                        if gate.shape[2] == 1 {
                            let one = gates.first().copied().unwrap_or_default();
                            gates.fill(one);
                        }
                        for (value, gate) in row.iter_mut().zip(&*gates) {
                            *value *= 1.0 / (1.0 + (-gate).exp());
                        }
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
