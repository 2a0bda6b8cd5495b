//! The output of an attention, and the rows that are compared with the reference.

use fastrand::Rng;
use mla_runtime::Result;
use mla_runtime::backend::Output;
use mla_runtime::device::Device;
use mla_runtime::model::DType;
use mla_runtime::tensor::{LseLayout, LseMut};

use crate::bench::work::Attention;
use crate::device::tensor::Tensor;
use crate::run::deviation::{Deviation, Errors, choose, tolerance};

/// The error of the worst row, in roundings. Weights, values and the output are each rounded to the
/// dtype once, at random from key to key. The worst of many rows has a few times the error of a
/// typical one.
const ROUNDINGS: f64 = 10.0;

/// The output and the log-sum-exp of an attention, on the device.
pub(super) struct Outcome<D: Device> {
    out: Tensor<D>,
    lse: Tensor<D>,
}

/// A row by its token and head, and its result in f64.
pub(super) type Expected = ((usize, usize), (Vec<f64>, f64));

impl<D: Device> Outcome<D> {
    pub(super) fn new(device: &D, dtype: DType, shape: [usize; 3]) -> Result<Self> {
        let [tokens, heads, _] = shape;
        Ok(Self {
            out: Tensor::unwritten(device, dtype, shape)?,
            lse: Tensor::unwritten(device, DType::F32, [1, heads, tokens])?,
        })
    }

    pub(super) fn write(&mut self) -> Result<(Output<'_, D>, LseMut<'_, D>)> {
        let out = self.out.view_mut()?;
        let [tokens, heads, _] = out.shape();
        let lse = self.lse.view_mut()?.into_bytes();
        let lse = LseMut::new(lse, LseLayout::heads_first(heads, tokens))?;
        Ok((Output::Plain(out), lse))
    }

    pub(super) fn compare(&self, device: &D, rows: Vec<Expected>) -> Result<Errors> {
        let mut deviation = Deviation::default();
        for ((token, head), (row, lse)) in rows {
            deviation.add(&self.out.read(device, token, head)?, &row);
            deviation.add_lse(self.lse.read(device, 0, head)?[token], lse);
        }
        Ok(deviation.errors(tolerance(self.out.dtype(), ROUNDINGS)))
    }
}

/// Chooses the rows that are compared with the reference.
pub(super) fn chosen(what: &Attention, count: usize) -> Vec<(usize, usize)> {
    let heads = what.config.problem.heads as usize;
    choose(
        &mut Rng::with_seed(what.seed ^ 0x5eed),
        &(0..what.tokens()),
        heads,
        count,
    )
}

/// Returns the request that a token belongs to.
pub(super) fn request_of(starts: &[i32], token: usize) -> usize {
    starts.partition_point(|start| *start as usize <= token) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_their_requests() {
        let starts = [0, 2, 3, 7];
        let found: Vec<_> = (0..7).map(|token| request_of(&starts, token)).collect();
        assert_eq!(found, [0, 0, 1, 2, 2, 2, 2]);
    }
}
