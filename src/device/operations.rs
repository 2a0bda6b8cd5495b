//! The operations of the device.

use mla_runtime::device::probe::{Dependents, Guards, Replayed};
use mla_runtime::device::{
    CacheRows, Device, Fp8Blocks, GatherRows, absorption, check_gather, check_merge, check_outputs,
    check_product, check_scatter, check_write,
};
use mla_runtime::plan::crossover::Machine;
use mla_runtime::spec::{Cause, Platform, Problem, Target};
use mla_runtime::tensor::{
    ArrayRef, CacheLayout, CacheMut, CacheRef, Layout, LseConvention, LseMut, LseRef, Memory,
    TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};

use super::argument::{dtype_code, format_code, narrow, unit_columns, wide};
use super::head_gemm::Fusion;
use super::memory::Bytes;
use super::{
    Cuda, DEPENDENT_LAUNCH, Rotary, blas, cache_expand, head_gemm, machine, probe, rotary,
};
use crate::{present_gpu, raw};

impl Device for Cuda {
    const PLATFORM: Platform = Platform::Cuda;

    fn availability() -> Result<(), Cause> {
        present_gpu().map(drop)
    }

    fn target(&self) -> Target {
        self.target()
    }

    fn ordinal(&self) -> usize {
        self.stream().context().ordinal()
    }

    fn machine(&self) -> Machine {
        let figures = machine::of(self.stream().context(), self.gpu());
        figures.unwrap_or_else(|| {
            tracing::warn!("the driver gives no figures of this GPU: an H200's are taken");
            Machine::H200
        })
    }

    fn check_tensor(&self, field: &'static str, layout: &Layout) -> Result<()> {
        unit_columns(field, layout)
    }

    fn check_operand(&self, field: &'static str, tensor: TensorRef<'_, Self>) -> Result<()> {
        blas::check_operand(field, tensor.layout())?;
        match self.batch_invariant {
            true => head_gemm::check_operand(field, tensor),
            false => Ok(()),
        }
    }

    fn batch_invariant(&self, problem: &Problem) -> Result<Self> {
        head_gemm::check_problem(problem)?;
        Ok(Self {
            batch_invariant: true,
            ..self.clone()
        })
    }

    fn gemm(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()> {
        self.product(a, b, c, false)
    }

    unsafe fn gemm_ready(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
    ) -> Result<()> {
        self.product(a, b, c, true)
    }

    fn scatter_rows(
        &self,
        from: TensorRef<'_, Self>,
        places: ArrayRef<'_, Self, i64>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        check_scatter(&from, &places, &to)?;
        let layout = *to.layout();
        let [to_rows, heads, width] = layout.shape;
        self.check_memory([
            ("rows to copy", from.bytes()),
            ("places", places.bytes()),
            ("destination", to.as_ref().bytes()),
        ])?;
        let params = raw::MlaCopyRowsParams {
            from: from.bytes().address() as *const _,
            places: places.bytes().address() as *const _,
            to: to.into_bytes().address() as *mut _,
            rows: wide("rows", places.len())?,
            to_rows: wide("rows", to_rows)?,
            heads: wide("heads", heads)?,
            width: wide("width", width)?,
            from_strides: wide_all(from.layout().strides)?,
            to_strides: wide_all(layout.strides)?,
            element_bytes: layout.dtype.bytes() as i32,
        };
        // SAFETY: both tensors were checked to hold what their layouts say, and to have one dtype
        // and rows of one shape. `places` has an entry for each row of the first tensor. The kernel
        // itself checks places against the rows of the second tensor. That tensor is borrowed
        // mutably, so the first tensor and `places` do not overlap it.
        unsafe { self.launch("copy rows", raw::mla_copy_rows, &params) }
    }

    fn dequantize_blocks(&self, from: Fp8Blocks<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        let ([rows, columns], layout) = (from.shape(), *to.layout());
        layout.require("dequantized matrix", layout.dtype, [1, rows, columns])?;
        unit_columns("dequantized matrix", &layout)?;
        self.check_memory([
            ("weight", from.codes()),
            ("weight_scale_inv", from.scales().bytes()),
            ("dequantized matrix", to.as_ref().bytes()),
        ])?;
        let params = raw::MlaDequantizeParams {
            codes: from.codes().address() as *const _,
            scales: from.scales().bytes().address() as *const _,
            out: to.into_bytes().address() as *mut _,
            out_row_stride: wide("row stride", layout.strides[1])?,
            rows: wide("rows", rows)?,
            columns: wide("columns", columns)?,
            first_row: narrow("first_row", from.first_row())?,
            dtype: dtype_code(layout.dtype),
        };
        // SAFETY: `Fp8Blocks` has a code for each element and a scale for each block. The output
        // was checked to hold the same number of elements. It is borrowed mutably, so the inputs do
        // not overlap it.
        unsafe { self.launch("dequantize", raw::mla_dequantize, &params) }
    }

    fn copy(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        from.layout()
            .require("copy source", to.dtype(), to.shape())?;
        self.check_bytes("copy source", from.bytes())?;
        self.copy_elements(Some((from.bytes(), from.layout())), to)
    }

    fn clear(&self, to: TensorMut<'_, Self>) -> Result<()> {
        self.copy_elements(None, to)
    }

    fn write_cache(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        slots: ArrayRef<'_, Self, i64>,
        mut cache: CacheMut<'_, Self>,
    ) -> Result<()> {
        let (latent, rope, slots) = (latent.shorten(), rope.shorten(), slots.shorten());
        self.write_rows(CacheRows::new(latent, rope, slots, cache.reborrow()), None)
    }

    fn write_cache_rotated(
        &self,
        latent: TensorRef<'_, Self>,
        rope: TensorRef<'_, Self>,
        rotary: &Rotary<'_>,
        query: Option<rotary::Query<'_, '_>>,
        slots: ArrayRef<'_, Self, i64>,
        mut cache: CacheMut<'_, Self>,
    ) -> Result<()> {
        let (latent, rope, slots) = (latent.shorten(), rope.shorten(), slots.shorten());
        let rows = CacheRows::new(latent, rope, slots, cache.reborrow());
        self.write_rows(rows.with_rotary(rotary.shorten()), query)
    }

    fn rotate(&self, rotary: &Rotary<'_>, vectors: TensorMut<'_, Self>) -> Result<()> {
        let Some(params) = rotary::params(self, rotary, vectors)? else {
            return Ok(());
        };
        // SAFETY: the vectors were checked to hold what their layouts say, and to agree with the
        // tables. The kernel itself checks positions against the tables. A cache without pages
        // takes no row.
        unsafe { self.launch("rotate", raw::mla_cache_write, &params) }
    }

    fn write_cache_and_absorb(
        &self,
        rows: CacheRows<'_, Self>,
        query: TensorRef<'_, Self>,
        weights: TensorRef<'_, Self>,
        mut to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let (a, b, c) = absorption(&query, &weights, &mut to)?;
        self.check_product(&a, &b, &c)?;
        if !self.takes_head_gemm(Fusion::CacheWrite, &a, &b, &c) {
            return rows.write_then_absorb(self, &query, &weights, to);
        }
        let product = head_gemm::params(&a, &b, c, false)?;
        let rotation = rows.query_rotation(&query, &weights, &mut to)?;
        let write = rows_params(self, rows, rotation)?;
        self.bind()?;
        // SAFETY: the tensors were checked to hold what their layouts say, and the layouts agree.
        // Outputs are borrowed mutably, so they do not overlap each other or the inputs. The kernel
        // itself checks slots and positions. No enqueued work still writes constant weights
        // (`TensorRef::assume_constant`), and the kernel waits for other weights.
        unsafe {
            raw::check(
                "absorb",
                raw::mla_absorb(&write, &product, self.raw_stream()),
            )
        }
    }

    fn gather_cache(
        &self,
        cache: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        latent: TensorMut<'_, Self>,
        rope: TensorMut<'_, Self>,
    ) -> Result<()> {
        let params = gather_params(self, &cache, &rows, &latent, &rope)?;
        // SAFETY: cache and outputs were checked to hold what their layouts say, and the index
        // arrays are as long as the segments need. The kernel itself checks the pages in these
        // arrays.
        unsafe { self.launch("gather cache", raw::mla_cache_gather, &params) }
    }

    fn gather_cache_and_expand(
        &self,
        cache: CacheRef<'_, Self>,
        rows: GatherRows<'_, Self>,
        gathered: (TensorMut<'_, Self>, TensorMut<'_, Self>),
        weights: TensorRef<'_, Self>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let (latent, rope) = &gathered;
        let gather = gather_params(self, &cache, &rows, latent, rope)?;
        let (dtype, latent_dim) = (to.dtype(), latent.shape()[2]);
        let [_, _, columns] = to.shape();
        to.layout()
            .require("expanded rows", latent.dtype(), [1, rows.rows, columns])?;
        weights
            .layout()
            .require("weights", dtype, [1, latent_dim, columns])?;
        self.check_memory([
            ("weights", weights.bytes()),
            ("expanded rows", to.as_ref().bytes()),
        ])?;
        if !cache_expand::fits(self, cache.layout(), &gather, &weights, &to) {
            return rows.gather_then_expand(self, cache, gathered, weights, to);
        }
        let params = cache_expand::params(gather, &weights, to)?;
        // SAFETY: as for a gather. Besides, the weights and the output were checked to hold what
        // their layouts say. The output is borrowed mutably, so the inputs do not overlap it.
        unsafe { self.launch("expand cache", raw::mla_cache_expand, &params) }
    }

    fn merge(
        &self,
        out: TensorMut<'_, Self>,
        lse: LseMut<'_, Self>,
        other: TensorRef<'_, Self>,
        other_lse: LseRef<'_, Self>,
    ) -> Result<()> {
        let layout = *out.layout();
        let [tokens, heads, width] = layout.shape;
        check_merge(&out, &lse, &other, &other_lse)?;
        unit_columns("out", &layout)?;
        unit_columns("other", other.layout())?;
        let (lse_layout, other_lse_layout) = (lse.layout(), other_lse.layout());
        self.check_memory([
            ("out", out.as_ref().bytes()),
            ("lse", lse.as_ref().bytes()),
            ("other", other.bytes()),
            ("other lse", other_lse.bytes()),
        ])?;
        let params = raw::MlaMergeParams {
            out: out.into_bytes().address() as *mut _,
            lse: lse.into_bytes().address() as *mut _,
            other: other.bytes().address() as *const _,
            other_lse: other_lse.bytes().address() as *const _,
            out_token_stride: wide("out", layout.strides[0])?,
            out_head_stride: wide("out", layout.strides[1])?,
            other_token_stride: wide("other", other.layout().strides[0])?,
            other_head_stride: wide("other", other.layout().strides[1])?,
            lse_head_stride: wide("lse", lse_layout.row_stride)?,
            other_lse_head_stride: wide("other lse", other_lse_layout.row_stride)?,
            tokens: narrow("tokens", tokens)?,
            heads: narrow("heads", heads)?,
            width: narrow("width", width)?,
            dtype: dtype_code(layout.dtype),
        };
        // SAFETY: all four tensors were checked to hold what their layouts say, and the layouts
        // agree.
        unsafe { self.launch("merge", raw::mla_merge, &params) }
    }

    fn scales_outputs(&self) -> bool {
        true
    }

    fn scale_outputs(
        &self,
        out: TensorMut<'_, Self>,
        sinks: Option<(ArrayRef<'_, Self, f32>, LseRef<'_, Self>)>,
        gate: Option<TensorRef<'_, Self>>,
    ) -> Result<()> {
        let layout = *out.layout();
        let [tokens, heads, width] = layout.shape;
        check_outputs(&out, sinks.as_ref(), gate.as_ref())?;
        unit_columns("out", &layout)?;
        self.check_memory([("out", out.as_ref().bytes())])?;
        let mut params = raw::MlaOutputsParams {
            out: out.into_bytes().address() as *mut _,
            out_token_stride: wide("out", layout.strides[0])?,
            out_head_stride: wide("out", layout.strides[1])?,
            tokens: narrow("tokens", tokens)?,
            heads: narrow("heads", heads)?,
            width: narrow("width", width)?,
            dtype: dtype_code(layout.dtype),
            ..Default::default()
        };
        if let Some((sinks, lse)) = &sinks {
            self.check_memory([("sinks", sinks.bytes()), ("lse", lse.bytes())])?;
            params.sinks = sinks.bytes().address() as *const _;
            params.lse = lse.bytes().address() as *const _;
            params.lse_head_stride = wide("lse", lse.layout().row_stride)?;
        }
        if let Some(gate) = &gate {
            let layout = gate.layout();
            unit_columns("gate", layout)?;
            self.check_memory([("gate", gate.bytes())])?;
            params.gate = gate.bytes().address() as *const _;
            params.gate_token_stride = wide("gate", layout.strides[0])?;
            params.gate_head_stride = wide("gate", layout.strides[1])?;
            params.gate_width = narrow("gate", layout.shape[2])?;
        }
        // SAFETY: the tensors and arrays were checked to hold what their layouts say, and the
        // layouts agree. The output is borrowed mutably, so the inputs do not overlap it.
        unsafe { self.launch("outputs", raw::mla_outputs, &params) }
    }

    fn fence(&self) -> Result<()> {
        if !self.has_dependent_launch() {
            return Ok(());
        }
        self.bind()?;
        match &self.inner.fence {
            // SAFETY: the kernel in the PTX takes no parameters, and up to 32 threads.
            Some(fence) => unsafe { fence.launch(32, [], false) },
            // SAFETY: the function takes only a stream. It is the device's, and its context is
            // current.
            None => unsafe { raw::check("fence", raw::mla_fence(self.raw_stream())) },
        }
    }

    fn probe_dependents(&self) -> Result<Option<Box<dyn Dependents<Self> + '_>>> {
        if !self.has_dependent_launch() {
            return Ok(None);
        }
        Ok(Some(Box::new(probe::Copies::load(self)?)))
    }

    fn probe_replay(&self, work: &mut dyn Replayed) -> Result<bool> {
        probe::replay(self, work).map(|()| true)
    }

    fn probe_guards(&self) -> Option<&dyn Guards> {
        Some(self)
    }

    #[cfg(feature = "nvtx")]
    fn profile_range<R>(&self, name: &'static std::ffi::CStr, work: impl FnOnce() -> R) -> R {
        let _range = nvtx::LocalRange::new(name);
        work()
    }

    fn convert_lse<C: LseConvention>(
        &self,
        from: LseRef<'_, Self, C>,
        to: LseMut<'_, Self>,
    ) -> Result<()> {
        let (from_layout, to_layout) = (from.layout(), to.layout());
        from_layout.require("lse", to_layout.heads, to_layout.tokens)?;
        self.check_memory([("lse", from.bytes()), ("natural lse", to.as_ref().bytes())])?;
        let params = raw::MlaLseParams {
            from: from.bytes().address() as *const _,
            to: to.into_bytes().address() as *mut _,
            from_row_stride: wide("lse", from_layout.row_stride)?,
            to_head_stride: wide("lse", to_layout.row_stride)?,
            tokens: narrow("tokens", from_layout.tokens)?,
            heads: narrow("heads", from_layout.heads)?,
            heads_first: i32::from(C::HEADS_FIRST),
            unit: C::UNIT,
        };
        // SAFETY: both were checked to hold what their layouts say, and the layouts agree.
        unsafe { self.launch("convert lse", raw::mla_lse_natural, &params) }
    }
}

impl Cuda {
    /// Refuses views of memory that belongs to another stream.
    pub(crate) fn check_memory<const N: usize>(
        &self,
        views: [(&'static str, Bytes<'_>); N],
    ) -> Result<()> {
        views
            .into_iter()
            .try_for_each(|(field, bytes)| self.check_bytes(field, bytes))
    }

    /// Refuses factors that do not fit each other or the result.
    fn check_product(
        &self,
        a: &TensorRef<'_, Self>,
        b: &TensorRef<'_, Self>,
        c: &TensorMut<'_, Self>,
    ) -> Result<()> {
        check_product(a, b, c)?;
        self.check_memory([
            ("gemm a", a.bytes()),
            ("gemm b", b.bytes()),
            ("gemm c", c.as_ref().bytes()),
        ])
    }

    /// True if a kernel may begin on this GPU before the preceding one has ended.
    fn has_dependent_launch(&self) -> bool {
        self.gpu().capability >= DEPENDENT_LAUNCH
    }

    /// Returns true if this crate's kernel is to compute `c[i] = a[i] · b[i]`.
    fn takes_head_gemm(
        &self,
        fusion: Fusion,
        a: &TensorRef<'_, Self>,
        b: &TensorRef<'_, Self>,
        c: &TensorMut<'_, Self>,
    ) -> bool {
        head_gemm::takes(a, b, c) && (self.batch_invariant || head_gemm::is_faster(fusion, c))
    }

    fn product(
        &self,
        a: TensorRef<'_, Self>,
        b: TensorRef<'_, Self>,
        c: TensorMut<'_, Self>,
        ready: bool,
    ) -> Result<()> {
        let [batch, m, n] = c.shape();
        let k = a.shape()[2];
        self.check_product(&a, &b, &c)?;
        if batch * m * n == 0 {
            return Ok(());
        }
        if k == 0 {
            return self.clear(c);
        }
        if self.batch_invariant
            && let Some(rows) = cache_expand::rows(self, &a, &b, &c)?
        {
            let params = cache_expand::params(rows, &b, c)?;
            // SAFETY: the tensors were checked to hold what their layouts say, and the layouts
            // agree. The output is borrowed mutably, so the inputs do not overlap it.
            return unsafe { self.launch("gemm", raw::mla_cache_expand, &params) };
        }
        if self.takes_head_gemm(Fusion::Alone, &a, &b, &c) {
            let params = head_gemm::params(&a, &b, c, ready)?;
            // SAFETY: the tensors were checked to hold what their layouts say, and the layouts
            // agree. The output is borrowed mutably, so the inputs do not overlap it. The kernel
            // reads constant weights without waiting (`TensorRef::assume_constant`). It reads other
            // memory without waiting only under the contract of `gemm_ready`.
            return unsafe { self.launch("gemm", raw::mla_head_gemm, &params) };
        }
        let layout = *c.layout();
        if self.batch_invariant {
            let given = format!("{} by {} into {layout}", a.layout(), b.layout());
            let accepted = "with batch_invariant, bf16 or f16, k and n of multiples of 64, other \
                            strides than 1 of 8, and addresses of 16 bytes";
            return Err(Error::argument("gemm", given, accepted));
        }
        let c = (c.into_bytes().address(), &layout);
        let (a, b) = ((a.bytes(), a.layout()), (b.bytes(), b.layout()));
        self.bind()?;
        self.blas().gemm(a, b, c)
    }

    fn write_rows(
        &self,
        rows: CacheRows<'_, Self>,
        query: Option<rotary::Query<'_, '_>>,
    ) -> Result<()> {
        let params = rows_params(self, rows, query)?;
        // SAFETY: every tensor was checked to hold what its layout says, and the layouts agree. The
        // kernel itself checks slots and positions against the cache and the tables.
        unsafe { self.launch("write cache", raw::mla_cache_write, &params) }
    }

    fn copy_elements(
        &self,
        from: Option<(Bytes<'_>, &Layout)>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let layout = *to.layout();
        self.check_bytes("copy target", to.as_ref().bytes())?;
        let params = raw::MlaCopyParams {
            from: from.map_or(std::ptr::null(), |(bytes, _)| bytes.address() as *const _),
            to: to.into_bytes().address() as *mut _,
            shape: wide_all(layout.shape)?,
            from_strides: from.map_or(Ok([0; 3]), |(_, layout)| wide_all(layout.strides))?,
            to_strides: wide_all(layout.strides)?,
            element_bytes: layout.dtype.bytes() as i32,
        };
        // SAFETY: both tensors were checked to hold what their layouts say, and have one shape and
        // dtype. The output is borrowed mutably, so the input does not overlap it.
        unsafe { self.launch("copy", raw::mla_copy, &params) }
    }
}

/// Converts extents or strides to the type of the C interface.
fn wide_all(numbers: [usize; 3]) -> Result<[i64; 3]> {
    let [a, b, c] = numbers.map(|number| wide("stride", number));
    Ok([a?, b?, c?])
}

/// Returns the parameters of a write of these rows to the cache, together with the rotation of
/// `query` if the rows have one. This checks every tensor.
pub(crate) fn rows_params(
    device: &Cuda,
    rows: CacheRows<'_, Cuda>,
    query: Option<rotary::Query<'_, '_>>,
) -> Result<raw::MlaCacheWriteParams> {
    let CacheRows {
        latent,
        rope,
        slots,
        cache,
        rotary,
        ..
    } = rows;
    let layout = *cache.layout();
    let (latent_dim, rope_dim) = widths(&layout);
    let rope_strides = layout.rope_strides();
    check_write(&latent, &rope, &slots, &layout)?;
    let (tokens, dtype) = (latent.shape()[0], latent.dtype());
    unit_columns("latent", latent.layout())?;
    unit_columns("rope", rope.layout())?;
    device.check_memory([
        ("latent", latent.bytes()),
        ("rope", rope.bytes()),
        ("slots", slots.bytes()),
        ("cache", cache.as_ref().bytes()),
        ("cache (rope)", cache.as_ref().rope_bytes()),
    ])?;
    // This is only an address and borrows nothing. The cache is borrowed mutably until the call
    // ends.
    let cache_rope = cache.as_ref().rope_bytes().address();
    let mut params = raw::MlaCacheWriteParams {
        latent: latent.bytes().address() as *const _,
        rope: rope.bytes().address() as *const _,
        slots: slots.bytes().address() as *const _,
        cache: cache.into_parts().0.address() as *mut _,
        cache_rope: cache_rope as *mut _,
        latent_token_stride: wide("latent", latent.layout().strides[0])?,
        rope_token_stride: wide("rope", rope.layout().strides[0])?,
        cache_page_stride: wide("page stride", layout.page_stride)?,
        cache_slot_stride: wide("row stride", layout.row_stride)?,
        cache_rope_page_stride: wide("rope page stride", rope_strides.page_stride)?,
        cache_rope_slot_stride: wide("rope row stride", rope_strides.row_stride)?,
        pages: wide("pages", layout.pages)?,
        tokens: narrow("tokens", tokens)?,
        page_size: narrow("page_size", layout.page_size)?,
        latent_dim: narrow("latent", latent_dim)?,
        rope_dim: narrow("rope", rope_dim)?,
        dtype: dtype_code(dtype),
        cache_format: format_code(layout.format),
        cache_scale: layout.scale,
        ..Default::default()
    };
    if let Some(rotary) = &rotary {
        let query = query
            .map(|query| rotary::places(device, query))
            .transpose()?;
        rotary::fill(device, rotary, query, tokens, rope_dim, dtype, &mut params)?;
    }
    Ok(params)
}

/// Refuses arrays whose lengths do not fit the segments of these rows. Returns the number of
/// segments.
fn check_segments(rows: &GatherRows<'_, Cuda>) -> Result<usize> {
    let segments = rows.row_starts.len().saturating_sub(1);
    for (name, given) in [
        ("token starts", rows.token_starts.len()),
        ("block table requests", rows.block_table.requests()),
    ] {
        if given != segments {
            let accepted = format!("{segments}, one per segment");
            return Err(Error::argument(name, given, accepted));
        }
    }
    Ok(segments)
}

/// Returns the parameters of a gather of these rows. This checks every tensor.
fn gather_params(
    device: &Cuda,
    cache: &CacheRef<'_, Cuda>,
    rows: &GatherRows<'_, Cuda>,
    latent: &TensorMut<'_, Cuda>,
    rope: &TensorMut<'_, Cuda>,
) -> Result<raw::MlaCacheGatherParams> {
    let layout = cache.layout();
    let (latent_dim, rope_dim) = widths(layout);
    let rope_strides = layout.rope_strides();
    check_gather(rows.rows, latent, rope, layout)?;
    let dtype = latent.dtype();
    unit_columns("gathered latent", latent.layout())?;
    unit_columns("gathered rope", rope.layout())?;
    let segments = check_segments(rows)?;
    device.check_memory([
        ("cache", cache.bytes()),
        ("cache (rope)", cache.rope_bytes()),
        ("block table", rows.block_table.entries().bytes()),
        ("token starts", rows.token_starts.bytes()),
        ("row starts", rows.row_starts.bytes()),
        ("gathered latent", latent.as_ref().bytes()),
        ("gathered rope", rope.as_ref().bytes()),
    ])?;
    let (latent_stride, rope_stride) = (latent.layout().strides[0], rope.layout().strides[0]);
    Ok(raw::MlaCacheGatherParams {
        cache: cache.bytes().address() as *const _,
        cache_rope: cache.rope_bytes().address() as *const _,
        block_table: rows.block_table.entries().bytes().address() as *const _,
        token_starts: rows.token_starts.bytes().address() as *const _,
        row_starts: rows.row_starts.bytes().address() as *const _,
        latent: latent.as_ref().bytes().address() as *mut _,
        rope: rope.as_ref().bytes().address() as *mut _,
        cache_page_stride: wide("page stride", layout.page_stride)?,
        cache_slot_stride: wide("row stride", layout.row_stride)?,
        cache_rope_page_stride: wide("rope page stride", rope_strides.page_stride)?,
        cache_rope_slot_stride: wide("rope row stride", rope_strides.row_stride)?,
        block_table_stride: wide("max pages", rows.block_table.max_pages())?,
        latent_row_stride: wide("gathered latent", latent_stride)?,
        rope_row_stride: wide("gathered rope", rope_stride)?,
        pages: wide("pages", layout.pages)?,
        rows: narrow("rows", rows.rows)?,
        segments: narrow("segments", segments)?,
        max_pages: narrow("max pages", rows.block_table.max_pages())?,
        page_size: narrow("page_size", layout.page_size)?,
        latent_dim: narrow("latent", latent_dim)?,
        rope_dim: narrow("rope", rope_dim)?,
        dtype: dtype_code(dtype),
        cache_format: format_code(layout.format),
        cache_scale: layout.scale,
    })
}

fn widths(layout: &CacheLayout) -> (usize, usize) {
    (layout.dims.latent as usize, layout.dims.head.rope as usize)
}
