//! Calls of decode.

use mla_kernels::raw::{MlaDecodeParams, MlaSparseParams};

use super::address;

/// A decode of `dims` with queries of `q_dtype` and a cache of `format`.
pub(crate) fn decode(
    dims: (i32, i32),
    q_dtype: i32,
    format: i32,
    (heads, query_len): (i32, i32),
) -> MlaDecodeParams {
    let (latent, rope) = dims;
    // Strides are in elements, or in bytes if a row has scales.
    let row = match format {
        4 | 5 => 656,
        _ => i64::from(latent + rope),
    };
    MlaDecodeParams {
        q_latent: address(1),
        q_rope: address(2),
        cache: address(3),
        block_table: address(4),
        kv_lens: address(5),
        out: address(6),
        lse: address(7),
        workspace: address(8),
        workspace_bytes: 1 << 30,
        q_latent_token_stride: i64::from(heads * latent),
        q_latent_head_stride: latent.into(),
        q_rope_token_stride: i64::from(heads * rope),
        q_rope_head_stride: rope.into(),
        cache_page_stride: row * 64,
        cache_slot_stride: row,
        block_table_stride: 40,
        out_token_stride: i64::from(heads * latent),
        out_head_stride: latent.into(),
        lse_head_stride: 1000,
        pages: 500,
        requests: 5,
        tokens: 5 * query_len,
        heads,
        query_len,
        page_size: 64,
        max_pages: 32,
        latent_dim: latent,
        rope_dim: rope,
        q_dtype,
        cache_format: format,
        causal: 1,
        softmax_scale: 0.125,
        cache_scale: if format == 3 { 0.5 } else { 1.0 },
        // SAFETY: every field is a number or a pointer.
        ..unsafe { std::mem::zeroed() }
    }
}

/// A sparse decode of 512 latent columns.
pub(crate) fn sparse(rope: i32, q_dtype: i32, format: i32, heads: i32) -> MlaSparseParams {
    // The bytes of a row.
    let row = match format {
        3 => 512 + rope,
        4 | 5 => 528 + 2 * rope,
        _ => 2 * (512 + rope),
    };
    MlaSparseParams {
        q_latent: address(1),
        q_rope: address(2),
        cache: address(3),
        lists: address(4),
        out: address(6),
        lse: address(7),
        q_latent_token_stride: i64::from(heads) * 512,
        q_latent_head_stride: 512,
        q_rope_token_stride: i64::from(heads * rope),
        q_rope_head_stride: rope.into(),
        cache_page_stride: i64::from(row) * 64,
        cache_slot_stride: row.into(),
        list_stride: 2048,
        out_token_stride: i64::from(heads) * 512,
        out_head_stride: 512,
        lse_head_stride: 1000,
        pages: 500,
        tokens: 4,
        heads,
        width: 2048,
        page_size: 64,
        latent_dim: 512,
        rope_dim: rope,
        q_dtype,
        cache_format: format,
        softmax_scale: 0.125,
        cache_scale: if format == 3 { 0.5 } else { 1.0 },
        // SAFETY: as above.
        ..unsafe { std::mem::zeroed() }
    }
}
