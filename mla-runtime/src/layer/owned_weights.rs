//! Weights in memory of their own, made when a checkpoint is loaded.

use std::ops::Range;

use super::Weights;
use super::weights::{head_range, outputs_of, widths};
use crate::backend::LayerConfig;
use crate::device::{Device, Fp8Blocks};
use crate::model::{DType, Element};
use crate::room::{with_room, zeros};
use crate::spec::Problem;
use crate::tensor::{Layout, TensorMut, TensorRef};
use crate::{Error, Result};

/// `W_kv_b` in memory of its own, in the problem's dtype. It is made once, when weights are loaded,
/// if the engine has the matrix in another form. Each layer needs H·(P+V)·L elements, which an
/// engine counts with its weights. A plain matrix needs no copy: [`Weights::from_checkpoint`] and
/// other constructors view it in place.
///
/// | the engine has | use |
/// |---|---|
/// | `[H·(P+V), L]`, fused | [`Weights::from_checkpoint`], [`Weights::from_checkpoint_heads`], without a copy |
/// | `[L, H·(P+V)]`, transposed | [`Weights::from_transposed`], [`Weights::from_transposed_heads`], without a copy |
/// | `[H, L, P]` and `[H, V, L]`, per head (GGUF's `attn_k_b` and `attn_v_b`) | [`from_split`](Self::from_split) |
/// | block fp8 128 × 128 with `weight_scale_inv` | [`from_fp8_blocks`](Self::from_fp8_blocks) |
/// | another quantised form, which it dequantises on the device | [`from_device`](Self::from_device) |
/// | another quantised form, which it dequantises on the host | [`from_rows`](Self::from_rows) |
///
/// All constructors except [`from_device`](Self::from_device) take the range of this rank's heads
/// under tensor parallelism. Tensors that they take have all heads of the model. The number of
/// heads in the range must be that of the configuration's problem.
///
/// All constructors except [`from_rows`](Self::from_rows) work on the device. Each constructor
/// waits for the device once, so that the weights are [constant](TensorRef::constant) from then on.
pub struct OwnedWeights<D: Device> {
    buffer: D::Buffer,
    problem: Problem,
}

impl<D: Device> OwnedWeights<D> {
    /// Makes weights from `k_b` `[heads, L, P]` and `v_b` `[heads, V, L]` with all heads and any
    /// strides.
    ///
    /// # Errors
    ///
    /// If a shape or dtype is not that of the problem, if the range does not have the problem's
    /// number of heads or exceeds the heads of the tensors, or if the device fails.
    pub fn from_split(
        device: &D,
        k_b: TensorRef<'_, D>,
        v_b: TensorRef<'_, D>,
        heads: Range<usize>,
        config: &LayerConfig,
    ) -> Result<Self> {
        let [_, latent, nope, _, v] = config.problem.extents();
        let [all, ..] = k_b.shape();
        head_range(&heads, all, config)?;
        let dtype = config.problem.dtype;
        for (field, given, shape, axes) in [
            ("k_b", k_b.layout(), [all, latent, nope], "[heads, L, P]"),
            ("v_b", v_b.layout(), [all, v, latent], "[heads, V, L]"),
        ] {
            if given.shape != shape || given.dtype != dtype {
                return Err(Error::argument(
                    field,
                    format!("{} {:?}", given.dtype, given.shape),
                    format!("{dtype} {shape:?}, that is {axes}"),
                ));
            }
        }
        device.check_bytes("k_b", k_b.bytes())?;
        device.check_bytes("v_b", v_b.bytes())?;
        Self::from_device(device, config, |to| {
            let layout = *to.layout();
            let [count, width] = [heads.len(), nope + v];
            // This is [H, P+V, L] in a matrix [1, H·(P+V), L].
            let layout = Layout {
                shape: [count, width, latent],
                strides: [width * latent, latent, 1],
                ..layout
            };
            let mut to = TensorMut::<D>::new(to.into_bytes(), layout)?;
            let keys = k_b.narrow(0, heads.clone())?.transpose(1, 2);
            device.copy(keys, to.reborrow().narrow(1, 0..nope)?)?;
            device.copy(v_b.narrow(0, heads.clone())?, to.narrow(1, nope..width)?)
        })
    }

    /// Makes weights from `kv_b_proj.weight` in block fp8, `[heads·(P+V), L]` with all heads, and
    /// its `weight_scale_inv`. Products of codes and scales are in f32 and rounded once.
    ///
    /// For a tensor that is already a rank's part, the range is 0 to H. If its rows begin inside a
    /// block, it is made by [`Fp8Blocks::from_row`].
    ///
    /// # Errors
    ///
    /// If the shape is not that of the problem, if the range does not have the problem's number of
    /// heads or exceeds the heads of the matrix, or if the device fails.
    pub fn from_fp8_blocks(
        device: &D,
        weight: Fp8Blocks<'_, D>,
        heads: Range<usize>,
        config: &LayerConfig,
    ) -> Result<Self> {
        let weight = weight.rows(outputs_of("weight", &heads, weight.shape(), config)?)?;
        Self::from_device(device, config, |to| device.dequantize_blocks(weight, to))
    }

    /// Makes weights from a matrix `[1, H·(P+V), L]` in the problem's dtype, which `write` writes
    /// row by row without gaps. There is a row for each output: for each head, P keys and then V
    /// values. An engine's own kernels can dequantise directly into this matrix.
    ///
    /// # Errors
    ///
    /// If `write` fails, or if the device has too little free memory.
    pub fn from_device<E: From<Error>>(
        device: &D,
        config: &LayerConfig,
        write: impl FnOnce(TensorMut<'_, D>) -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        let problem = config.problem;
        if let Some(fault) = problem.fault() {
            return Err(Error::from(fault).into());
        }
        let layout = layout(config);
        let bytes = layout.elements().saturating_mul(layout.dtype.bytes());
        let mut buffer = device.allocate(bytes)?;
        write(TensorMut::new(D::bytes_mut(&mut buffer), layout)?)?;
        device.synchronize()?;
        Ok(Self { buffer, problem })
    }

    /// Makes weights from rows that `dequantize` computes on the host, one at a time. A row has the
    /// L values of row `h·(P+V) + j` of the matrix of all heads, for the heads h of the range. Rows
    /// are rounded to the problem's dtype and uploaded one head at a time.
    ///
    /// # Errors
    ///
    /// If `dequantize` or the device fails, or if the range does not have the problem's number of
    /// heads.
    pub fn from_rows<E: From<Error>>(
        device: &D,
        heads: Range<usize>,
        config: &LayerConfig,
        mut dequantize: impl FnMut(usize, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        head_range(&heads, usize::MAX, config)?;
        let [latent, width, _] = widths(config);
        let dtype = config.problem.dtype;
        Self::from_device(device, config, |to| {
            let mut row = with_room(latent)?;
            row.resize(latent, 0.0f32);
            let row_bytes = latent * dtype.bytes();
            let mut staging = zeros(width.saturating_mul(row_bytes))?;
            let mut rest = to.into_bytes();
            for head in heads {
                for (own, staged) in staging.chunks_exact_mut(row_bytes).enumerate() {
                    dequantize(head * width + own, &mut row)?;
                    match dtype {
                        DType::F32 => round::<f32>(&row, staged),
                        DType::F16 => round::<half::f16>(&row, staged),
                        DType::BF16 => round::<half::bf16>(&row, staged),
                    }
                }
                let (to, behind) = D::split_mut(rest, staging.len());
                device.upload(&staging, to)?;
                rest = behind;
            }
            Ok(())
        })
    }

    /// The weights for a layer's call.
    ///
    /// # Errors
    ///
    /// If the weights were made for other heads, dimensions or another dtype than the
    /// configuration's.
    pub fn weights(&self, config: &LayerConfig) -> Result<Weights<'_, D>> {
        let (own, theirs) = (&self.problem, &config.problem);
        let made = |problem: &Problem| (problem.heads, problem.dims, problem.dtype);
        if made(own) != made(theirs) {
            let shown = |problem: &Problem| {
                let (heads, dims) = (problem.heads, problem.dims);
                format!("{} for {heads} heads of {dims:?}", problem.dtype)
            };
            return Err(Error::argument("W_kv_b", shown(own), shown(theirs)));
        }
        let kv_b = TensorRef::new(D::bytes(&self.buffer), layout(config))?;
        // SAFETY: the work that wrote the buffer is done: `from_device` makes every value of this
        // type, and has waited for it. Nothing else writes the buffer, since it is private to this
        // value.
        let kv_b = unsafe { kv_b.assume_constant() };
        Weights::from_checkpoint(kv_b, config)
    }
}

fn round<T: Element>(row: &[f32], to: &mut [u8]) {
    for (value, to) in row.iter().zip(to.chunks_exact_mut(size_of::<T>())) {
        to.copy_from_slice(bytemuck::bytes_of(&T::from_f32(*value)));
    }
}

/// The layout `[1, H·(P+V), L]`, as checkpoints have it.
fn layout(config: &LayerConfig) -> Layout {
    let [latent, _, columns] = widths(config);
    Layout::contiguous(config.problem.dtype, [1, columns, latent])
}
