//! The weights of a layer, as views of one matrix.

use crate::backend::LayerConfig;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Layout, TensorRef};

/// `W_kv_b`, and what the two forms of attention use of it.
///
/// Column `h·(P+V) + j` of `W_kv_b` makes value j of head h: its key for j < P, its value above.
/// The absorbed form multiplies by the two parts of each head, W_UK and W_UV. All of them are
/// strided views, which every matrix product takes as they are: so there is no second copy, which
/// would be as large as the first (32 MiB for DeepSeek-V3 in bf16, for each layer), and an engine
/// that swaps or offloads weights has one place to do it.
pub struct Weights<'a, D: Device> {
    /// `[1, L, H·(P+V)]`: latents to keys and values.
    pub(super) kv: TensorRef<'a, D>,
    /// `[H, P, L]`: a head's query to the latent.
    pub(super) queries: TensorRef<'a, D>,
    /// `[H, L, P]`: latents to a head's key.
    pub(super) keys: TensorRef<'a, D>,
    /// `[H, L, V]`: latents to a head's value.
    pub(super) values: TensorRef<'a, D>,
}

impl<D: Device> Clone for Weights<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Weights<'_, D> {}

impl<'a, D: Device> Weights<'a, D> {
    /// From `W_kv_b` as `[1, L, H·(P+V)]`, with any strides.
    ///
    /// Published checkpoints hold the transpose, `kv_b_proj.weight` of shape `[H·(P+V), L]`: a
    /// view of it as `[1, H·(P+V), L]` with [`TensorRef::transpose`] of its last two axes is what
    /// is wanted here. In that form both W_UK and W_UV have unit stride along L.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn new(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let problem = &config.problem;
        let heads = problem.heads as usize;
        let latent = problem.dims.latent as usize;
        let (nope, v) = (
            problem.dims.head.nope as usize,
            problem.dims.head.v as usize,
        );
        let width = nope + v;
        // No matrix has as many columns as what saturates.
        let expected = [1, latent, heads.saturating_mul(width)];
        if kv_b.shape() != expected || kv_b.dtype() != problem.dtype {
            return Err(Error::argument(
                "W_kv_b",
                format!("{} {:?}", kv_b.dtype(), kv_b.shape()),
                format!("{} {expected:?}, that is [1, L, H·(P+V)]", problem.dtype),
            ));
        }
        let [_, row, column] = kv_b.layout().strides;
        // The part of every head from column `from` on, with axes of the given extents and strides.
        let part = |from: usize, shape: [usize; 2], strides: [usize; 2]| {
            let columns = kv_b.narrow(2, from..kv_b.shape()[2])?;
            TensorRef::new(
                columns.bytes(),
                Layout {
                    dtype: problem.dtype,
                    shape: [heads, shape[0], shape[1]],
                    strides: [width * column, strides[0], strides[1]],
                },
            )
        };
        Ok(Self {
            kv: kv_b,
            queries: part(0, [nope, latent], [column, row])?,
            keys: part(0, [latent, nope], [row, column])?,
            values: part(nope, [latent, v], [row, column])?,
        })
    }

    /// The same views for a shorter time: those of an engine's own, long-lived memory, beside
    /// tensors of one call.
    pub fn shorten<'short>(&self) -> Weights<'short, D>
    where
        'a: 'short,
    {
        Weights {
            kv: self.kv.shorten(),
            queries: self.queries.shorten(),
            keys: self.keys.shorten(),
            values: self.values.shorten(),
        }
    }
}
