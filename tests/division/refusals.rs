//! Refusals of Hopper's raw launches that follow from the host's numbers alone, without a device:
//! sizes and strides whose products would leave 64 bits.

#[path = "../gpu/refusals.rs"]
mod wrong_fields;

use mla_kernels::raw::{self, MlaDecodeParams, MlaPrefillParams};

use wrong_fields::{WrongField, each_is_refused, prefill_without_addresses};

/// An address that no call here reads.
const PLACE: usize = 1 << 40;
const TOO_WIDE: i64 = 1 << 39;

fn place<T>() -> *mut T {
    std::ptr::without_provenance_mut(PLACE)
}

fn decode() -> MlaDecodeParams {
    MlaDecodeParams {
        q_latent: place(),
        q_rope: place(),
        cache: place(),
        block_table: place(),
        kv_lens: place(),
        out: place(),
        lse: place(),
        workspace: place(),
        q_latent_token_stride: 16 * 576,
        q_latent_head_stride: 576,
        q_rope_token_stride: 16 * 576,
        q_rope_head_stride: 576,
        cache_page_stride: 64 * 576,
        cache_slot_stride: 576,
        cache_rope: place::<u8>().wrapping_add(2 * 512).cast(),
        cache_rope_page_stride: 64 * 576,
        cache_rope_slot_stride: 576,
        block_table_stride: 8,
        out_token_stride: 16 * 512,
        out_head_stride: 512,
        lse_head_stride: 2,
        pages: 16,
        requests: 2,
        tokens: 2,
        heads: 16,
        query_len: 1,
        page_size: 64,
        max_pages: 8,
        latent_dim: 512,
        rope_dim: 64,
        cache_format: raw::MLA_CACHE_BF16 as i32,
        softmax_scale: 0.1,
        cache_scale: 1.0,
        ..Default::default()
    }
}

fn prefill() -> MlaPrefillParams {
    let mut params = prefill_without_addresses();
    (params.query, params.key_nope, params.key_rope) = (place(), place(), place());
    (params.value, params.out, params.lse) = (place(), place(), place());
    (params.cu_query_lens, params.cu_key_lens) = (place(), place());
    params.workspace = place();
    params
}

#[test]
fn decode_refuses_what_leaves_64_bits() {
    let wrong: &[WrongField<MlaDecodeParams>] = &[
        ("heads", |p| (p.heads, p.query_len) = (i32::MAX, i32::MAX)),
        ("query_len", |p| p.query_len = i32::MAX),
        ("requests", |p| p.requests = 4096),
        ("requests", |p| p.requests = i32::MIN),
        ("page_size", |p| p.page_size = i32::MAX),
        ("pages", |p| p.pages = i64::MAX),
        ("max_pages", |p| p.max_pages = i32::MAX),
        ("max_pages", |p| {
            (p.requests, p.tokens) = (1024, 1024);
            p.max_pages = (1 << 28) / p.page_size;
        }),
        ("q_latent_token_stride", |p| {
            p.q_latent_token_stride = TOO_WIDE
        }),
        ("q_latent_head_stride", |p| {
            p.q_latent_head_stride = TOO_WIDE
        }),
        ("q_rope_token_stride", |p| p.q_rope_token_stride = 1 << 62),
        ("q_rope_head_stride", |p| p.q_rope_head_stride = 1 << 62),
        ("out_token_stride", |p| p.out_token_stride = TOO_WIDE),
        ("out_head_stride", |p| p.out_head_stride = TOO_WIDE),
        ("cache_slot_stride", |p| p.cache_slot_stride = TOO_WIDE),
        ("cache_page_stride", |p| p.cache_page_stride = TOO_WIDE),
        ("cache_rope", |p| {
            p.cache_rope = p.cache_rope.wrapping_byte_add(8)
        }),
        ("cache_rope_slot_stride", |p| {
            p.cache_rope_slot_stride = TOO_WIDE
        }),
        ("cache_rope_page_stride", |p| {
            p.cache_rope_page_stride = TOO_WIDE
        }),
        ("cache_rope_slot_stride", |p| p.cache_rope_slot_stride = 56),
        ("block_table_stride", |p| p.block_table_stride = TOO_WIDE),
        ("block_table_stride", |p| p.block_table_stride = i64::MAX),
        ("lse_head_stride", |p| p.lse_head_stride = TOO_WIDE),
        ("lse_head_stride", |p| p.lse_head_stride = i64::MAX),
    ];
    // SAFETY: the parameters live on the caller's stack; what they point to is read by launched
    // kernels alone, and a refused call launches none.
    each_is_refused(&decode(), wrong, |params| unsafe {
        raw::mla_decode_sm90(params, std::ptr::null_mut())
    });
}

#[test]
fn the_workspace_of_a_decode_is_refused_before_its_rows_are_multiplied() {
    let mut params = decode();
    (params.heads, params.query_len) = (i32::MAX, i32::MAX);
    let mut bytes = 0;
    // SAFETY: both live on this stack.
    let status = unsafe { raw::mla_decode_sm90_workspace(&params, &mut bytes) };
    // SAFETY: the status is that of a function of `raw`.
    let error = unsafe { raw::check("workspace", status) }
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("heads: given 2147483647, accepted 1..=128"),
        "{error}"
    );
}

#[test]
fn prefill_refuses_what_leaves_64_bits() {
    let wrong: &[WrongField<MlaPrefillParams>] = &[
        ("heads", |p| p.heads = 65_536),
        ("requests", |p| p.requests = i32::MIN),
        ("max_query_len", |p| p.max_query_len = i32::MAX),
        // 2^31 rows of 2^39 elements: 2^71 bytes.
        ("max_query_len", |p| {
            (p.max_query_len, p.query_token_stride) = (i32::MAX - 128, TOO_WIDE - 8)
        }),
        ("max_query_len", |p| {
            (p.max_query_len, p.out_token_stride) = (i32::MAX - 128, TOO_WIDE - 8)
        }),
        ("max_key_len", |p| {
            (p.max_key_len, p.key_nope_token_stride) = (i32::MAX, TOO_WIDE - 8)
        }),
        ("max_key_len", |p| {
            (p.max_key_len, p.key_rope_token_stride) = (i32::MAX, TOO_WIDE - 8)
        }),
        // A row more than there is room for before the tensor.
        ("max_key_len", |p| {
            p.value_token_stride = 1 << 20;
            p.max_key_len = (PLACE >> 21) as i32 + 1;
        }),
        ("query_token_stride", |p| p.query_token_stride = TOO_WIDE),
        ("value_head_stride", |p| p.value_head_stride = i64::MAX - 7),
        ("lse_head_stride", |p| p.lse_head_stride = TOO_WIDE),
        ("lse_head_stride", |p| p.lse_head_stride = i64::MAX),
    ];
    // SAFETY: the parameters live on the caller's stack; what they point to is read by launched
    // kernels alone, and a refused call launches none.
    each_is_refused(&prefill(), wrong, |params| unsafe {
        raw::mla_prefill_sm90(params, std::ptr::null_mut())
    });
}
