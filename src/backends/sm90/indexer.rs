//! The lightning indexer on Hopper GPUs: `docs/kernels/indexer.md`.

use mla_runtime::device::CacheRows;
use mla_runtime::indexer::{IndexCacheMut, IndexDevice, IndexKeys, IndexQueries, IndexRows};
use mla_runtime::model::IndexerConfig;
use mla_runtime::tensor::{Memory as _, Rotary, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

use crate::device::argument::{dtype_code, narrow, style_code, unit_columns, wide};
use crate::device::{Bytes, BytesMut, Cuda, rows_params};
use crate::raw;

/// Number of values that the kernels rotate: the first 64 of 128.
const ROPE: u32 = 64;

impl IndexDevice for Cuda {
    fn write_index_keys(&self, config: &IndexerConfig, keys: IndexKeys<'_, Self>) -> Result<()> {
        let params = keys_params(self, config, keys)?;
        // SAFETY: every tensor and array was checked to hold what its layout says, and the layouts
        // agree. The kernel itself skips slots that the cache does not have.
        unsafe { self.launch("index keys", raw::mla_index_keys_sm90, &params) }
    }

    fn write_cache_and_index_keys(
        &self,
        config: &IndexerConfig,
        rows: CacheRows<'_, Self>,
        query: Option<(TensorRef<'_, Self>, TensorMut<'_, Self>)>,
        keys: IndexKeys<'_, Self>,
        queries: Option<IndexQueries<'_, Self>>,
    ) -> Result<()> {
        let keys = keys_params(self, config, keys)?;
        let rows = rows_params(self, rows, query)?;
        let queries = queries.map(|queries| queries_params(self, config, queries));
        let queries = queries.transpose()?;
        let given = queries
            .as_ref()
            .map_or(std::ptr::null(), std::ptr::from_ref);
        self.bind()?;
        // SAFETY: every tensor and array was checked to hold what its layout says, and the layouts
        // agree. Caches and quantised queries are borrowed mutably, so they do not overlap each
        // other or any input.
        unsafe {
            raw::check(
                "index write",
                raw::mla_index_write_sm90(&rows, &keys, given, self.raw_stream()),
            )
        }
    }

    fn quantise_index_queries(
        &self,
        config: &IndexerConfig,
        queries: IndexQueries<'_, Self>,
    ) -> Result<()> {
        let params = queries_params(self, config, queries)?;
        // SAFETY: every tensor was checked to hold what its layout says, and the layouts agree.
        unsafe { self.launch("index queries", raw::mla_index_queries_sm90, &params) }
    }

    fn index_logits(
        &self,
        config: &IndexerConfig,
        queries: Bytes<'_>,
        weights: TensorRef<'_, Self>,
        cache: &IndexCacheMut<'_, Self>,
        rows: &IndexRows<'_, Self>,
        logits: TensorMut<'_, Self>,
    ) -> Result<()> {
        let columns = rows.check(&logits.as_ref())?;
        rows.check_queries(config, queries.len(), &weights)?;
        let layout = cache.layout();
        if layout.width != config.width as usize {
            let given = format!("keys of {} values", layout.width);
            let accepted = format!("{}, as index_head_dim says", config.width);
            return Err(Error::argument("index cache", given, accepted));
        }
        check_rows(self, rows)?;
        self.check_memory([
            ("index logits", logits.as_ref().bytes()),
            ("index queries", queries),
            ("scaled head weights", weights.bytes()),
            ("index cache", cache.bytes()),
        ])?;
        let params = raw::MlaIndexLogitsParams {
            logits_stride: wide("index logits", logits.layout().strides[1])?,
            logits: logits.into_bytes().address() as *mut _,
            queries: queries.address() as *const _,
            weights: weights.bytes().address() as *const _,
            cache: cache.bytes().address() as *const _,
            query_starts: rows.batch.query_starts.bytes().address() as *const _,
            seq_lens: rows.batch.seq_lens.bytes().address() as *const _,
            block_table: rows.batch.block_table.entries().bytes().address() as *const _,
            page_stride: wide("page stride", layout.page_stride)?,
            block_table_stride: wide("block table", rows.batch.block_table.max_pages())?,
            pages: wide("pages", layout.pages)?,
            rows: narrow("tokens", rows.tokens.len())?,
            first_token: narrow("tokens", rows.tokens.start)?,
            requests: narrow("requests", rows.batch.seq_lens.len())?,
            columns: narrow("columns", columns)?,
            max_pages: narrow("block table", rows.batch.block_table.max_pages())?,
            page_size: narrow("page_size", layout.page_size)?,
            heads: narrow("index_n_heads", config.heads as usize)?,
            width: narrow("index_head_dim", config.width as usize)?,
            after_queries: rows.in_turn().into(),
        };
        // SAFETY: every tensor and array was checked to hold what its layout says, and the layouts
        // agree. The kernel itself skips pages that the cache does not have, and columns that do
        // not exist.
        unsafe { self.launch("index logits", raw::mla_index_logits_sm90, &params) }
    }

    fn select_slots(
        &self,
        logits: TensorRef<'_, Self>,
        rows: &IndexRows<'_, Self>,
        page_size: usize,
        slots: BytesMut<'_>,
        width: usize,
    ) -> Result<()> {
        let columns = rows.check(&logits)?;
        rows.check_lists(slots.len(), width)?;
        check_rows(self, rows)?;
        self.check_memory([
            ("index logits", logits.bytes()),
            ("slot lists", Self::freeze(&slots)),
        ])?;
        let params = raw::MlaTopkParams {
            logits: logits.bytes().address() as *const _,
            query_starts: rows.batch.query_starts.bytes().address() as *const _,
            seq_lens: rows.batch.seq_lens.bytes().address() as *const _,
            block_table: rows.batch.block_table.entries().bytes().address() as *const _,
            lists: slots.address() as *mut _,
            logits_stride: wide("index logits", logits.layout().strides[1])?,
            block_table_stride: wide("block table", rows.batch.block_table.max_pages())?,
            list_stride: wide("slot lists", width)?,
            // The block table names pages of the caller's cache. The number of pages is not known
            // here.
            pages: i64::from(i32::MAX),
            rows: narrow("tokens", rows.tokens.len())?,
            first_token: narrow("tokens", rows.tokens.start)?,
            requests: narrow("requests", rows.batch.seq_lens.len())?,
            columns: narrow("columns", columns)?,
            topk: narrow("slot lists", width)?,
            max_pages: narrow("block table", rows.batch.block_table.max_pages())?,
            page_size: narrow("page_size", page_size)?,
            after_logits: rows.in_turn().into(),
        };
        // SAFETY: every tensor and array was checked to hold what its layout says, and the layouts
        // agree.
        unsafe { self.launch("top-k", raw::mla_topk_sm90, &params) }
    }
}

/// Refuses a batch with arrays that belong to another stream.
fn check_rows(device: &Cuda, rows: &IndexRows<'_, Cuda>) -> Result<()> {
    device.check_memory([
        ("query starts", rows.batch.query_starts.bytes()),
        ("lengths", rows.batch.seq_lens.bytes()),
        ("block table", rows.batch.block_table.entries().bytes()),
    ])
}

/// Returns the parameters of a write of index keys.
fn keys_params(
    device: &Cuda,
    config: &IndexerConfig,
    keys: IndexKeys<'_, Cuda>,
) -> Result<raw::MlaIndexKeysParams> {
    let tokens = keys.check(config)?;
    let [weight, bias] = &keys.norm;
    unit_columns("index keys", keys.keys.layout())?;
    unit_columns("index norm weight", weight.layout())?;
    unit_columns("index norm bias", bias.layout())?;
    device.check_memory([
        ("index keys", keys.keys.bytes()),
        ("index norm weight", weight.bytes()),
        ("index norm bias", bias.bytes()),
        ("slots", keys.slots.bytes()),
        ("index cache", keys.cache.bytes()),
    ])?;
    let cache = *keys.cache.layout();
    // The launch refuses null pointers, or takes them for absent tensors.
    Ok(raw::MlaIndexKeysParams {
        keys: keys.keys.bytes().address() as *const _,
        norm_weight: weight.bytes().address() as *const _,
        norm_bias: bias.bytes().address() as *const _,
        slots: keys.slots.bytes().address() as *const _,
        cache: keys.cache.into_bytes().address() as *mut _,
        rotary: rotary(device, config, keys.rotary.as_ref())?,
        key_stride: wide("index keys", keys.keys.layout().strides[0])?,
        page_stride: wide("page stride", cache.page_stride)?,
        pages: wide("pages", cache.pages)?,
        tokens: narrow("tokens", tokens)?,
        page_size: narrow("page_size", cache.page_size)?,
        width: narrow("index_head_dim", config.width as usize)?,
        keys_dtype: dtype_code(keys.keys.dtype()),
        norm_weight_dtype: dtype_code(weight.dtype()),
        norm_bias_dtype: dtype_code(bias.dtype()),
        hadamard: config.hadamard.into(),
        epsilon: config.epsilon,
    })
}

/// Returns the parameters of the kernel that quantises index queries.
fn queries_params(
    device: &Cuda,
    config: &IndexerConfig,
    from: IndexQueries<'_, Cuda>,
) -> Result<raw::MlaIndexQueriesParams> {
    let tokens = from.check(config)?;
    unit_columns("index queries", from.queries.layout())?;
    unit_columns("index head weights", from.weights.layout())?;
    device.check_memory([
        ("index queries", from.queries.bytes()),
        ("index head weights", from.weights.bytes()),
        ("quantised index queries", Cuda::freeze(&from.quantised)),
        ("scaled head weights", from.scaled_weights.as_ref().bytes()),
    ])?;
    Ok(raw::MlaIndexQueriesParams {
        queries: from.queries.bytes().address() as *const _,
        head_weights: from.weights.bytes().address() as *const _,
        values: from.quantised.address() as *mut _,
        weights: from.scaled_weights.into_bytes().address() as *mut _,
        rotary: rotary(device, config, from.rotary.as_ref())?,
        query_token_stride: wide("index queries", from.queries.layout().strides[0])?,
        query_head_stride: wide("index queries", from.queries.layout().strides[1])?,
        head_weight_stride: wide("index head weights", from.weights.layout().strides[0])?,
        tokens: narrow("tokens", tokens)?,
        heads: narrow("index_n_heads", config.heads as usize)?,
        width: narrow("index_head_dim", config.width as usize)?,
        queries_dtype: dtype_code(from.queries.dtype()),
        head_weights_dtype: dtype_code(from.weights.dtype()),
        hadamard: config.hadamard.into(),
        weight_scale: config.weight_scale(),
    })
}

/// Returns the parameters of the rotation.
fn rotary(
    device: &Cuda,
    config: &IndexerConfig,
    rotary: Option<&Rotary<'_, Cuda>>,
) -> Result<raw::MlaIndexRotary> {
    // Null positions mean that nothing is rotated.
    let mut params = raw::MlaIndexRotary::default();
    let Some(rotary) = rotary else {
        return Ok(params);
    };
    if config.rope != ROPE {
        return Err(Error::argument("index rope", config.rope, ROPE));
    }
    let positions = rotary.positions()?;
    device.check_memory([
        ("positions", positions.bytes()),
        ("cos", rotary.cos.bytes()),
        ("sin", rotary.sin.bytes()),
    ])?;
    let cos = rotary.cos.layout();
    params.positions = positions.bytes().address() as *const _;
    params.cos = rotary.cos.bytes().address() as *const _;
    params.sin = rotary.sin.bytes().address() as *const _;
    params.table_stride = wide("cos", cos.strides[1])?;
    params.positions_len = wide("positions", cos.shape[1])?;
    params.style = style_code(rotary.style);
    Ok(params)
}
