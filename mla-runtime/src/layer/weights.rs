//! The weights of a layer, as views of one matrix.

use std::ops::Range;

use crate::backend::LayerConfig;
use crate::device::Device;
use crate::setters::copies;
use crate::tensor::{Layout, TensorRef};
use crate::{Error, Result, named};

/// `W_kv_b`, and views of its parts for the two forms of attention.
///
/// Column `h·(P+V) + j` of `W_kv_b` makes value j of head h: part of its key if j < P, and of its
/// value otherwise. The absorbed form multiplies by the two parts of each head, W_UK and W_UV. All
/// parts are strided views, which every matrix product supports without a copy. A copy would be as
/// large as the matrix (32 MiB for DeepSeek-V3 in bf16, for each layer). An engine that swaps or
/// offloads weights would also have to handle it separately.
///
/// If the matrix is [constant](TensorRef::constant), a GPU reads the views before earlier work is
/// done. This saves time.
///
/// The name of a constructor gives the orientation of its matrix. The shape does not determine it,
/// because both orientations have the same shape if H·(P+V) = L.
pub struct Weights<'a, D: Device> {
    /// `[1, L, H·(P+V)]`, from latents to keys and values.
    pub(super) kv: TensorRef<'a, D>,
    /// `[H, P, L]`, from a head's query to the latent space.
    pub(super) queries: TensorRef<'a, D>,
    /// `[H, L, P]`, from latents to a head's key.
    pub(super) keys: TensorRef<'a, D>,
    /// `[H, L, V]`, from latents to a head's value.
    pub(super) values: TensorRef<'a, D>,
}

copies!([D: Device] Weights<'_, D>);

impl<'a, D: Device> Weights<'a, D> {
    /// Views of `kv_b_proj.weight` as published checkpoints store it: `[1, H·(P+V), L]`, a row for
    /// each output, with any strides. W_UK and W_UV then have unit stride along L.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn from_checkpoint(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let [latent, _, columns] = widths(config);
        let shape = [1, columns, latent];
        check_matrix(&kv_b, config, shape, "[1, H·(P+V), L]")?;
        Self::new(kv_b.transpose(1, 2), config)
    }

    /// Views of this rank's heads in a matrix with all heads of the model, `[1, heads·(P+V), L]`.
    /// The number of heads in the range must be that of the configuration's problem. Nothing is
    /// copied.
    ///
    /// # Errors
    ///
    /// The errors of [`from_checkpoint`](Self::from_checkpoint). Also if the range does not
    /// have the problem's number of heads, or exceeds the heads of the matrix.
    pub fn from_checkpoint_heads(
        kv_b: TensorRef<'a, D>,
        heads: Range<usize>,
        config: &LayerConfig,
    ) -> Result<Self> {
        let [_, rows, columns] = kv_b.shape();
        let part = outputs_of("W_kv_b", &heads, [rows, columns], config)?;
        Self::from_checkpoint(named("W_kv_b", kv_b.narrow(1, part))?, config)
    }

    /// Views of the transpose of a checkpoint's matrix: `[1, L, H·(P+V)]`, a column for each
    /// output, with any strides. A product of latents has this matrix as its right factor.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn from_transposed(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let [latent, _, columns] = widths(config);
        let shape = [1, latent, columns];
        check_matrix(&kv_b, config, shape, "[1, L, H·(P+V)]")?;
        Self::new(kv_b, config)
    }

    /// Views of this rank's heads in a transposed matrix with all heads of the model, `[1, L,
    /// heads·(P+V)]`. The number of heads in the range must be that of the configuration's problem.
    /// Nothing is copied.
    ///
    /// # Errors
    ///
    /// The errors of [`from_transposed`](Self::from_transposed). Also if the range does not
    /// have the problem's number of heads, or exceeds the heads of the matrix.
    pub fn from_transposed_heads(
        kv_b: TensorRef<'a, D>,
        heads: Range<usize>,
        config: &LayerConfig,
    ) -> Result<Self> {
        let [_, rows, columns] = kv_b.shape();
        let part = outputs_of("W_kv_b", &heads, [columns, rows], config)?;
        Self::from_transposed(named("W_kv_b", kv_b.narrow(2, part))?, config)
    }

    /// Views of a matrix `[1, L, H·(P+V)]` that has been checked.
    fn new(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let [heads, latent, nope, _, v] = config.problem.extents();
        let width = nope + v;
        let [_, row, column] = kv_b.layout().strides;
        // The part of every head that begins at column `from`, with axes of the given extents and
        // strides.
        let part = |from: usize, shape: [usize; 2], strides: [usize; 2]| {
            let columns = named("W_kv_b", kv_b.narrow(2, from..kv_b.shape()[2]))?;
            columns.with_layout(Layout {
                dtype: config.problem.dtype,
                shape: [heads, shape[0], shape[1]],
                strides: [width * column, strides[0], strides[1]],
            })
        };
        Ok(Self {
            kv: kv_b,
            queries: part(0, [nope, latent], [column, row])?,
            keys: part(0, [latent, nope], [row, column])?,
            values: part(nope, [latent, v], [row, column])?,
        })
    }

    /// `W_kv_b` as `[1, L, H·(P+V)]`, in either orientation in memory.
    pub fn matrix(&self) -> TensorRef<'a, D> {
        self.kv
    }

    /// The same views with a shorter lifetime. Views of an engine's long-lived memory can then be
    /// used together with tensors of one call.
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

/// Refuses an adapter (LoRA) that changes `kv_b_proj`. The adapter is given by the names of the
/// modules that it changes, such as `target_modules` of an `adapter_config.json`.
///
/// The layer multiplies queries and outputs by one matrix for all tokens of a step. The absorbed
/// form has no keys and values per token, to which a token's own low-rank product could be added.
/// Adapters of all other modules change only the layer's inputs, so the engine applies them itself.
/// An adapter that changes `kv_b_proj` can be merged into separate weights
/// ([`OwnedWeights`](super::OwnedWeights)). Its requests then need steps of their own. The cache
/// holds latents, which do not depend on this matrix.
///
/// # Errors
///
/// If a name is `kv_b_proj`, if it ends with `.kv_b_proj`, or if it is `all-linear`, which includes
/// it.
pub fn check_adapter<'a>(target_modules: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let changes_kv_b = |module: &str| {
        let name = module.rsplit('.').next().unwrap_or(module);
        name == "kv_b_proj" || name == "all-linear"
    };
    match target_modules
        .into_iter()
        .find(|module| changes_kv_b(module))
    {
        None => Ok(()),
        Some(module) => Err(Error::argument(
            "target_modules",
            module,
            "modules other than kv_b_proj, by whose one matrix a step's queries and outputs are \
             multiplied: merge the adapter into weights of its own, for steps of its own",
        )),
    }
}

/// L, P+V and H·(P+V). The product may saturate, but no matrix has that number of columns.
pub(super) fn widths(config: &LayerConfig) -> [usize; 3] {
    let [heads, latent, nope, _, v] = config.problem.extents();
    [latent, nope + v, heads.saturating_mul(nope + v)]
}

/// The outputs of these heads in a matrix of `outputs` outputs and `inputs` inputs. The outputs
/// must be whole heads, and the inputs must be L.
pub(super) fn outputs_of(
    field: &'static str,
    heads: &Range<usize>,
    [outputs, inputs]: [usize; 2],
    config: &LayerConfig,
) -> Result<Range<usize>> {
    let [latent, width, _] = widths(config);
    if inputs != latent || width == 0 || !outputs.is_multiple_of(width) {
        return Err(Error::argument(
            field,
            format!("{outputs} outputs of {inputs} inputs"),
            format!("heads of P + V = {width} outputs each, of L = {latent} inputs"),
        ));
    }
    head_range(heads, outputs / width, config)?;
    Ok(heads.start * width..heads.end * width)
}

/// Refuses a range of heads that lies outside `all` heads, or whose length is not the problem's
/// number of heads.
pub(super) fn head_range(heads: &Range<usize>, all: usize, config: &LayerConfig) -> Result<()> {
    let own = config.problem.heads as usize;
    let count = heads.end.checked_sub(heads.start);
    let [_, width, _] = widths(config);
    let outputs = heads.end.checked_mul(width);
    if count == Some(own) && heads.end <= all && outputs.is_some() {
        return Ok(());
    }
    let of = match all {
        usize::MAX => String::new(),
        all => format!(" of the tensor's {all}"),
    };
    let accepted = format!("a range of the problem's {own} heads{of}");
    Err(Error::argument("heads", format!("{heads:?}"), accepted))
}

fn check_matrix<D: Device>(
    kv_b: &TensorRef<'_, D>,
    config: &LayerConfig,
    shape: [usize; 3],
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
