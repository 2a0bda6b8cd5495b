//! The weights of a layer, as views of one matrix.

use crate::backend::LayerConfig;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Layout, Shape, TensorRef};

/// `W_kv_b`, and what the two forms of attention use of it.
///
/// Column `h·(P+V) + j` of `W_kv_b` makes value j of head h: its key for j < P, its value above.
/// The absorbed form multiplies by the two parts of each head, W_UK and W_UV. All of them are
/// strided views, which every matrix product takes as they are: so there is no second copy, which
/// would be as large as the first (32 MiB for DeepSeek-V3 in bf16, for each layer), and an engine
/// that swaps or offloads weights has one place to do it.
///
/// A constructor is named by the orientation of its matrix. None guesses it from the shape, which
/// is the same for both if H·(P+V) = L.
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
    /// From `kv_b_proj.weight` as published checkpoints hold it: `[1, H·(P+V), L]`, a row for each
    /// output, with any strides. W_UK and W_UV then have unit stride along L.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn from_checkpoint(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let [latent, columns] = extents(config);
        check_matrix(&kv_b, config, [1, columns, latent], "[1, H·(P+V), L]")?;
        Self::new(kv_b.transpose(1, 2), config)
    }

    /// From the transpose of a checkpoint's matrix, as a product of latents has it on its right:
    /// `[1, L, H·(P+V)]`, a column for each output, with any strides.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn from_transposed(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let [latent, columns] = extents(config);
        check_matrix(&kv_b, config, [1, latent, columns], "[1, L, H·(P+V)]")?;
        Self::new(kv_b, config)
    }

    /// From a matrix `[1, L, H·(P+V)]` that was checked.
    fn new(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let problem = &config.problem;
        let heads = problem.heads as usize;
        let latent = problem.dims.latent as usize;
        let (nope, v) = (
            problem.dims.head.nope as usize,
            problem.dims.head.v as usize,
        );
        let width = nope + v;
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

/// L and H·(P+V). No matrix has as many columns as what saturates.
fn extents(config: &LayerConfig) -> [usize; 2] {
    let problem = &config.problem;
    let width = problem.dims.head.nope as usize + problem.dims.head.v as usize;
    let columns = (problem.heads as usize).saturating_mul(width);
    [problem.dims.latent as usize, columns]
}

fn check_matrix<D: Device>(
    kv_b: &TensorRef<'_, D>,
    config: &LayerConfig,
    shape: Shape,
    axes: &str,
) -> Result<()> {
    let dtype = config.problem.dtype;
    if kv_b.shape() == shape && kv_b.dtype() == dtype {
        return Ok(());
    }
    Err(Error::argument(
        "W_kv_b",
        format!("{} {:?}", kv_b.dtype(), kv_b.shape()),
        format!("{dtype} {shape:?}, that is {axes}"),
    ))
}
