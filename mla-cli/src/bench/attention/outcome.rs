//! The output of an attention, and the rows of it that are compared with the reference.

use fastrand::Rng;
use mla_conformance::reference::decode_row;
use mla_runtime::Result;
use mla_runtime::backend::Output;
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::tensor::{Layout, LseLayout, LseMut, TensorMut};

use crate::bench::work::Attention;
use crate::device::memory::upload;
use crate::run::deviation::choose;

/// Results, and where they are.
pub(super) struct Outcome<D: Device> {
    out: D::Buffer,
    out_layout: Layout,
    lse: D::Buffer,
    lse_layout: LseLayout,
}

impl<D: Device> Outcome<D> {
    pub(super) fn new(device: &D, dtype: DType, shape: [usize; 3]) -> Result<Self> {
        let out_layout = Layout::contiguous(dtype, shape);
        // NaN, so that nothing passes for a result that was not written.
        let poison = |bytes: usize| upload(device, &vec![0xff_u8; bytes]);
        Ok(Self {
            out: poison(out_layout.elements() * dtype.bytes())?,
            out_layout,
            lse: poison(shape[0] * shape[1] * 4)?,
            lse_layout: LseLayout::heads_first(shape[1], shape[0]),
        })
    }

    pub(super) fn write(&mut self) -> Result<(Output<'_, D>, LseMut<'_, D>)> {
        let out = TensorMut::new(D::bytes_mut(&mut self.out), self.out_layout)?;
        let lse = LseMut::new(D::bytes_mut(&mut self.lse), self.lse_layout)?;
        Ok((Output::Plain(out), lse))
    }

    /// One head's output and log-sum-exp for one token.
    pub(super) fn row(&self, device: &D, token: usize, head: usize) -> Result<(Vec<f64>, f64)> {
        let [tokens, heads, width] = self.out_layout.shape;
        let mut row = vec![0; width * self.out_layout.dtype.bytes()];
        let start = (token * heads + head) * row.len();
        let bytes = D::byte_range(D::bytes(&self.out), start..start + row.len());
        device.download(bytes, &mut row)?;
        let mut lse = [0; 4];
        let start = (head * tokens + token) * 4;
        device.download(
            D::byte_range(D::bytes(&self.lse), start..start + 4),
            &mut lse,
        )?;
        let format = KvFormat::of(self.out_layout.dtype);
        // A row without a rotary part.
        let row = decode_row(format, width, 0, &row, 1.0);
        Ok((row, f32::from_ne_bytes(lse).into()))
    }
}

/// The rows that are compared with the reference.
pub(super) fn chosen(what: &Attention, count: usize) -> Vec<(usize, usize)> {
    let heads = what.config.problem.heads as usize;
    choose(
        &mut Rng::with_seed(what.seed ^ 0x5eed),
        &(0..what.tokens()),
        heads,
        count,
    )
}

/// The request that a token belongs to.
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
