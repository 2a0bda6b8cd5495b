//! The weights of a layer, as views of one matrix.

use std::ops::Range;

use crate::backend::LayerConfig;
use crate::device::Device;
use crate::tensor::{Layout, TensorRef};
use crate::{Error, Named as _, Result};

/// `W_kv_b`, and what the two forms of attention use of it.
///
/// Column `h·(P+V) + j` of `W_kv_b` makes value j of head h: its key for j < P, its value above.
/// The absorbed form multiplies by the two parts of each head, W_UK and W_UV. All of them are
/// strided views, which every matrix product takes without a copy. A copy would be as large as the
/// matrix (32 MiB for DeepSeek-V3 in bf16, for each layer), and an engine that swaps or offloads
/// weights would have two places to do it.
///
/// A GPU reads the views of a [constant](TensorRef::constant) matrix before the work that was
/// enqueued earlier is done, which saves time.
///
/// A constructor is named by the orientation of its matrix. The shape does not tell it: both have
/// the same shape if H·(P+V) = L.
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
    /// Views of `kv_b_proj.weight` as published checkpoints hold it: `[1, H·(P+V), L]`, a row for
    /// each output, with any strides. W_UK and W_UV then have unit stride along L.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn from_checkpoint(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let extents = Extents::of(config);
        let shape = [1, extents.columns(), extents.latent];
        check_matrix(&kv_b, config, shape, "[1, H·(P+V), L]")?;
        Self::new(kv_b.transpose(1, 2), config)
    }

    /// Views of this rank's heads in the same matrix with all heads of the model,
    /// `[1, heads·(P+V), L]`. Their number is that of the configuration's problem. Nothing is
    /// copied.
    ///
    /// # Errors
    ///
    /// Same as [`from_checkpoint`](Self::from_checkpoint), or if the range has another number of
    /// heads or lies outside.
    pub fn from_checkpoint_heads(
        kv_b: TensorRef<'a, D>,
        heads: Range<usize>,
        config: &LayerConfig,
    ) -> Result<Self> {
        let extents = Extents::of(config);
        let [_, rows, columns] = kv_b.shape();
        let all = extents.whole_heads("W_kv_b", rows, columns)?;
        let part = extents.columns_of(&heads, all, config)?;
        Self::from_checkpoint(kv_b.narrow(1, part).named("W_kv_b")?, config)
    }

    /// Views of the transpose of a checkpoint's matrix, as a product of latents has it on its
    /// right: `[1, L, H·(P+V)]`, a column for each output, with any strides.
    ///
    /// # Errors
    ///
    /// If the shape or the dtype is not that of the configuration's problem.
    pub fn from_transposed(kv_b: TensorRef<'a, D>, config: &LayerConfig) -> Result<Self> {
        let extents = Extents::of(config);
        let shape = [1, extents.latent, extents.columns()];
        check_matrix(&kv_b, config, shape, "[1, L, H·(P+V)]")?;
        Self::new(kv_b, config)
    }

    /// Views of this rank's heads in the same matrix with all heads of the model,
    /// `[1, L, heads·(P+V)]`. Their number is that of the configuration's problem. Nothing is
    /// copied.
    ///
    /// # Errors
    ///
    /// Same as [`from_transposed`](Self::from_transposed), or if the range has another number of
    /// heads or lies outside.
    pub fn from_transposed_heads(
        kv_b: TensorRef<'a, D>,
        heads: Range<usize>,
        config: &LayerConfig,
    ) -> Result<Self> {
        let extents = Extents::of(config);
        let [_, rows, columns] = kv_b.shape();
        let all = extents.whole_heads("W_kv_b", columns, rows)?;
        let part = extents.columns_of(&heads, all, config)?;
        Self::from_transposed(kv_b.narrow(2, part).named("W_kv_b")?, config)
    }

    /// Views of a matrix `[1, L, H·(P+V)]` that was checked.
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
            let columns = kv_b.narrow(2, from..kv_b.shape()[2]).named("W_kv_b")?;
            columns.with_layout(Layout {
                dtype: problem.dtype,
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

    /// `W_kv_b` as `[1, L, H·(P+V)]`, however it lies.
    pub fn matrix(&self) -> TensorRef<'a, D> {
        self.kv
    }

    /// The same views with a shorter lifetime, so that views of an engine's long-lived memory can
    /// be used beside tensors of one call.
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

/// Refuses a request's adapter (LoRA) that changes `kv_b_proj`, by the names of the modules that it
/// changes, such as `target_modules` of an `adapter_config.json`.
///
/// The layer multiplies queries and outputs by one matrix for all tokens of a step. The absorbed
/// form has no keys and values per token to which a token's own low-rank product could be added.
/// Adapters of every other module are the engine's own: they change the layer's inputs. One that
/// changes `kv_b_proj` can be merged into weights of its own
/// ([`OwnedWeights`](super::OwnedWeights)), and its requests get steps of their own; the cache
/// holds latents, which do not depend on this matrix.
///
/// # Errors
///
/// If a name is `kv_b_proj`, or ends with it behind a dot, or is `all-linear`, which includes it.
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

/// The widths that a layer's weights follow from.
pub(super) struct Extents {
    pub(super) heads: usize,
    pub(super) latent: usize,
    pub(super) nope: usize,
    pub(super) v: usize,
}

impl Extents {
    pub(super) fn of(config: &LayerConfig) -> Self {
        let problem = &config.problem;
        let head = problem.dims.head;
        let [heads, latent, nope, v] =
            [problem.heads, problem.dims.latent, head.nope, head.v].map(|n| n as usize);
        Self {
            heads,
            latent,
            nope,
            v,
        }
    }

    /// P+V.
    pub(super) fn width(&self) -> usize {
        self.nope + self.v
    }

    /// H·(P+V). No matrix has as many columns as what saturates.
    pub(super) fn columns(&self) -> usize {
        self.heads.saturating_mul(self.width())
    }

    /// The heads of a matrix of `outputs` outputs and `inputs` inputs, which have to be whole heads
    /// and L.
    pub(super) fn whole_heads(
        &self,
        field: &'static str,
        outputs: usize,
        inputs: usize,
    ) -> Result<usize> {
        let (width, latent) = (self.width(), self.latent);
        if inputs == latent && width > 0 && outputs.is_multiple_of(width) {
            return Ok(outputs / width);
        }
        Err(Error::argument(
            field,
            format!("{outputs} outputs of {inputs} inputs"),
            format!("heads of P + V = {width} outputs each, of L = {latent} inputs"),
        ))
    }

    /// Returns the columns of the outputs of these heads of `all`.
    fn columns_of(
        &self,
        heads: &Range<usize>,
        all: usize,
        config: &LayerConfig,
    ) -> Result<Range<usize>> {
        head_range(heads, all, config)?;
        Ok(heads.start * self.width()..heads.end * self.width())
    }
}

/// Refuses a range of heads that lies outside `all` heads, or whose length is not the problem's
/// number of heads.
pub(super) fn head_range(heads: &Range<usize>, all: usize, config: &LayerConfig) -> Result<()> {
    let own = config.problem.heads as usize;
    let count = heads.end.checked_sub(heads.start);
    let outputs = heads.end.checked_mul(Extents::of(config).width());
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
