//! Calls of the C interface with contiguous rows, for tests that run, record or refuse them. All
//! addresses are null: a caller sets those that its call needs.

use mla_kernels::raw::{
    self, MlaCacheWriteParams, MlaDecodeParams, MlaPrefillParams, MlaSparseParams,
};
#[cfg(feature = "sm90")]
use mla_kernels::raw::{
    MlaIndexKeysParams, MlaIndexLogitsParams, MlaIndexQueriesParams, MlaTopkParams,
};
use mla_runtime::model::{DType, KvFormat, MlaDims};

/// Returns the number of a dtype in the C interface.
pub(crate) fn dtype_number(of: DType) -> i32 {
    (match of {
        DType::F16 => raw::MLA_DTYPE_F16,
        DType::BF16 => raw::MLA_DTYPE_BF16,
        DType::F32 => raw::MLA_DTYPE_F32,
    }) as i32
}

/// Returns the number of a cache format in the C interface.
pub(crate) fn format_number(rows: KvFormat) -> i32 {
    let numbers = [
        (KvFormat::F32, raw::MLA_CACHE_F32),
        (KvFormat::F16, raw::MLA_CACHE_F16),
        (KvFormat::BF16, raw::MLA_CACHE_BF16),
        (KvFormat::Fp8, raw::MLA_CACHE_FP8),
        (KvFormat::Fp8DsMla, raw::MLA_CACHE_FP8_DS_MLA),
        (KvFormat::Fp8PerToken, raw::MLA_CACHE_FP8_PER_TOKEN),
    ];
    let of_rows = numbers.iter().find(|it| it.0 == rows);
    of_rows.expect("every format has a number").1 as i32
}

/// Returns the dimensions of a model whose rows have these widths.
pub(crate) const fn dims_of(latent: u32, rope: u32) -> MlaDims {
    MlaDims::new(latent, MlaDims::R1.head.with_rope(rope))
}

/// The widths that Hopper's prefill takes: of a key's two parts, and of a value.
pub(crate) const PREFILL_DIMS: [[i32; 3]; 6] = [
    [128, 64, 128],
    [192, 64, 256],
    [192, 64, 128],
    [64, 64, 128],
    [256, 0, 256],
    [64, 32, 64],
];

/// Returns a cache's scale, which is 1 if its format has none.
fn cache_scale(rows: KvFormat) -> f32 {
    if rows.has_tensor_scale() { 0.3 } else { 1.0 }
}

/// A causal decode in pages of 64 tokens. The two parts of a query are side by side, and a cache of
/// one tensor has room for all requests.
pub(crate) fn decode(
    dims: MlaDims,
    dtype: DType,
    rows: KvFormat,
    [heads, query_len]: [i32; 2],
    [requests, max_pages]: [i32; 2],
) -> MlaDecodeParams {
    let [latent, rope, query] = [dims.latent, dims.head.rope, dims.row()].map(|it| it as i32);
    let tokens = requests * query_len;
    // Strides are in elements, or in bytes of a quantised cache.
    let slot = (rows.pitch(dims) / rows.dtype().map_or(1, DType::bytes)) as i64;
    MlaDecodeParams {
        q_latent_token_stride: (heads * query).into(),
        q_latent_head_stride: query.into(),
        q_rope_token_stride: (heads * query).into(),
        q_rope_head_stride: query.into(),
        cache_page_stride: 64 * slot,
        cache_slot_stride: slot,
        block_table_stride: max_pages.into(),
        out_token_stride: (heads * latent).into(),
        out_head_stride: latent.into(),
        lse_head_stride: tokens.into(),
        pages: (requests * max_pages).into(),
        requests,
        tokens,
        heads,
        query_len,
        page_size: 64,
        max_pages,
        latent_dim: latent,
        rope_dim: rope,
        q_dtype: dtype_number(dtype),
        cache_format: format_number(rows),
        causal: 1,
        softmax_scale: 0.04,
        cache_scale: cache_scale(rows),
        ..Default::default()
    }
}

/// A sparse decode with lists of `width` slots, in pages of 64. Strides of the cache are in bytes.
pub(crate) fn sparse(
    dims: MlaDims,
    dtype: DType,
    rows: KvFormat,
    heads: i32,
    [tokens, width, pages]: [i32; 3],
) -> MlaSparseParams {
    let [latent, rope, query] = [dims.latent, dims.head.rope, dims.row()].map(|it| it as i32);
    let slot = rows.pitch(dims) as i64;
    MlaSparseParams {
        q_latent_token_stride: (heads * query).into(),
        q_latent_head_stride: query.into(),
        q_rope_token_stride: (heads * query).into(),
        q_rope_head_stride: query.into(),
        cache_page_stride: 64 * slot,
        cache_slot_stride: slot,
        list_stride: width.into(),
        out_token_stride: (heads * latent).into(),
        out_head_stride: latent.into(),
        lse_head_stride: tokens.into(),
        pages: pages.into(),
        tokens,
        heads,
        width,
        page_size: 64,
        latent_dim: latent,
        rope_dim: rope,
        q_dtype: dtype_number(dtype),
        cache_format: format_number(rows),
        softmax_scale: 0.04,
        cache_scale: cache_scale(rows),
        ..Default::default()
    }
}

/// A causal prefill. Keys have two parts in tensors of their own, and all heads share the rotary
/// part.
pub(crate) fn prefill(
    [nope, rope, value]: [i32; 3],
    dtype: DType,
    [heads, requests]: [i32; 2],
    [query_tokens, key_tokens]: [i32; 2],
    [max_query_len, max_key_len]: [i32; 2],
) -> MlaPrefillParams {
    MlaPrefillParams {
        query_token_stride: (heads * (nope + rope)).into(),
        query_head_stride: (nope + rope).into(),
        key_nope_token_stride: (heads * nope).into(),
        key_nope_head_stride: nope.into(),
        key_rope_token_stride: rope.into(),
        value_token_stride: (heads * value).into(),
        value_head_stride: value.into(),
        out_token_stride: (heads * value).into(),
        out_head_stride: value.into(),
        lse_head_stride: query_tokens.into(),
        query_tokens,
        key_tokens,
        requests,
        heads,
        max_query_len,
        max_key_len,
        nope_dim: nope,
        rope_dim: rope,
        value_dim: value,
        dtype: dtype_number(dtype),
        causal: 1,
        softmax_scale: 0.07,
        ..Default::default()
    }
}

/// A cache write to pages of 64, in a cache of one tensor. The two parts of a token have contiguous
/// rows of their own. Strides of the cache are in bytes.
pub(crate) fn cache_write(
    dims: MlaDims,
    dtype: DType,
    rows: KvFormat,
    tokens: i32,
    pages: i64,
) -> MlaCacheWriteParams {
    let [latent, rope] = [dims.latent, dims.head.rope].map(|width| width as i32);
    let slot = rows.pitch(dims) as i64;
    MlaCacheWriteParams {
        latent_token_stride: latent.into(),
        rope_token_stride: rope.into(),
        cache_page_stride: 64 * slot,
        cache_slot_stride: slot,
        pages,
        tokens,
        page_size: 64,
        latent_dim: latent,
        rope_dim: rope,
        dtype: dtype_number(dtype),
        cache_format: format_number(rows),
        cache_scale: cache_scale(rows),
        ..Default::default()
    }
}

/// Values of an index key, and of a head's index query.
#[cfg(feature = "sm90")]
const INDEX_WIDTH: i32 = 128;

/// Index keys in bf16 without rotation, which are written to pages of 64.
#[cfg(feature = "sm90")]
pub(crate) fn index_keys(tokens: i32, pages: i64) -> MlaIndexKeysParams {
    MlaIndexKeysParams {
        key_stride: INDEX_WIDTH.into(),
        page_stride: 64 * (i64::from(INDEX_WIDTH) + 4),
        pages,
        tokens,
        page_size: 64,
        width: INDEX_WIDTH,
        hadamard: 1,
        epsilon: 1e-6,
        ..Default::default()
    }
}

/// Index queries in bf16 without rotation.
#[cfg(feature = "sm90")]
pub(crate) fn index_queries(tokens: i32, heads: i32) -> MlaIndexQueriesParams {
    MlaIndexQueriesParams {
        query_token_stride: (heads * INDEX_WIDTH).into(),
        query_head_stride: INDEX_WIDTH.into(),
        head_weight_stride: heads.into(),
        tokens,
        heads,
        width: INDEX_WIDTH,
        weight_scale: 0.5,
        ..Default::default()
    }
}

/// Index logits of `rows` query tokens, in a cache of `pages`.
#[cfg(feature = "sm90")]
pub(crate) fn index_logits(
    heads: i32,
    [rows, requests, columns]: [i32; 3],
    [page_size, max_pages]: [i32; 2],
    pages: i64,
) -> MlaIndexLogitsParams {
    let page = page_size * (INDEX_WIDTH + 4);
    MlaIndexLogitsParams {
        page_stride: ((page + 15) / 16 * 16).into(),
        block_table_stride: max_pages.into(),
        logits_stride: columns.into(),
        pages,
        rows,
        requests,
        columns,
        max_pages,
        page_size,
        heads,
        width: INDEX_WIDTH,
        ..Default::default()
    }
}

/// Lists of the `topk` best of each row's logits, in pages of 64.
#[cfg(feature = "sm90")]
pub(crate) fn topk(
    topk: i32,
    [rows, requests, columns]: [i32; 3],
    max_pages: i32,
    pages: i64,
) -> MlaTopkParams {
    MlaTopkParams {
        logits_stride: columns.into(),
        block_table_stride: max_pages.into(),
        list_stride: topk.into(),
        pages,
        rows,
        requests,
        columns,
        topk,
        max_pages,
        page_size: 64,
        ..Default::default()
    }
}
