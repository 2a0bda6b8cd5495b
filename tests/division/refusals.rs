//! Tests of refusals by Hopper's raw launches that need only the host's numbers and no device. They
//! try each field with a bad value, and sizes and strides whose products exceed 64 bits.

#[path = "../gpu/refusals.rs"]
mod wrong_fields;

use mla_kernels::raw::{self, MlaDecodeParams, MlaPrefillParams};
use mla_runtime::model::{DType, KvFormat, MlaDims};

use super::{calls, checked};
use wrong_fields::{WrongField, each_is_refused};

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
        cache_rope: place::<u8>().wrapping_add(2 * 512).cast(),
        cache_rope_page_stride: 64 * 576,
        cache_rope_slot_stride: 576,
        ..calls::decode(MlaDims::R1, DType::BF16, KvFormat::BF16, [16, 1], [2, 8])
    }
}

/// Returns a call with two requests and two heads each. All rows are contiguous.
fn prefill() -> MlaPrefillParams {
    MlaPrefillParams {
        query: place(),
        key_nope: place(),
        key_rope: place(),
        value: place(),
        out: place(),
        lse: place(),
        cu_query_lens: place(),
        cu_key_lens: place(),
        workspace: place(),
        ..calls::prefill([128, 64, 128], DType::BF16, [2, 2], [130; 2], [100; 2])
    }
}

#[test]
fn decode_refuses_each_bad_field() {
    let wrong: &[WrongField<MlaDecodeParams>] = &[
        ("heads", |p| p.heads = 0),
        ("heads", |p| p.heads = 129),
        ("query_len", |p| p.query_len = 0),
        ("query_len", |p| p.query_len = 17),
        ("requests", |p| p.requests = 0),
        ("requests", |p| p.requests = 1025),
        ("latent_dim", |p| p.latent_dim = 384),
        ("rope_dim", |p| p.rope_dim = 32),
        ("q_dtype", |p| p.q_dtype = raw::MLA_DTYPE_F32 as i32),
        ("cache_format", |p| {
            p.cache_format = raw::MLA_CACHE_F16 as i32
        }),
        ("cache_scale", |p| {
            p.cache_format = raw::MLA_CACHE_FP8 as i32;
            p.cache_scale = 0.0;
        }),
        ("cache_slot_stride", |p| {
            p.cache_format = raw::MLA_CACHE_FP8 as i32;
            p.cache_slot_stride = 584;
        }),
        ("tokens", |p| p.tokens = 1),
        ("tokens", |p| p.tokens = -1),
        ("page_size", |p| p.page_size = 0),
        ("page_size", |p| p.page_size = 24),
        ("pages", |p| p.pages = 0),
        ("max_pages", |p| p.max_pages = 0),
        ("max_pages", |p| p.max_pages = (1 << 29) / p.page_size + 1),
        ("max_pages", |p| {
            // The table's width is within the limit of one request.
            (p.requests, p.tokens) = (1024, 1024);
            p.max_pages = (1 << 28) / p.page_size;
        }),
        ("block_table_stride", |p| p.block_table_stride = 1),
        ("block_table_stride", |p| p.block_table_stride = 1 << 39),
        ("q_latent", |p| p.q_latent = std::ptr::null()),
        ("q_latent", |p| p.q_latent = p.q_latent.wrapping_byte_add(2)),
        ("q_rope", |p| p.q_rope = std::ptr::null()),
        ("q_rope", |p| p.q_rope = p.q_rope.wrapping_byte_add(8)),
        ("cache", |p| p.cache = std::ptr::null()),
        ("cache", |p| p.cache = p.cache.wrapping_byte_add(4)),
        ("out", |p| p.out = std::ptr::null_mut()),
        ("out", |p| p.out = p.out.wrapping_byte_add(2)),
        ("q_latent_token_stride", |p| p.q_latent_token_stride = -8),
        ("q_latent_head_stride", |p| p.q_latent_head_stride = 577),
        ("q_rope_token_stride", |p| p.q_rope_token_stride = 4),
        ("q_rope_head_stride", |p| p.q_rope_head_stride = -1),
        ("out_token_stride", |p| p.out_token_stride = 1),
        ("out_head_stride", |p| p.out_head_stride = 513),
        ("out_head_stride", |p| p.out_head_stride = 1 << 39),
        ("cache_slot_stride", |p| {
            (p.cache_slot_stride, p.cache_rope_slot_stride) = (568, 568)
        }),
        ("cache_slot_stride", |p| p.cache_slot_stride = 504),
        ("cache_rope", |p| {
            p.cache_rope = p.cache_rope.wrapping_byte_add(4)
        }),
        ("cache_rope_slot_stride", |p| p.cache_rope_slot_stride = 56),
        ("cache_rope_slot_stride", |p| p.cache_rope_slot_stride = 68),
        ("cache_rope_page_stride", |p| {
            p.cache_rope_page_stride = 1 << 39
        }),
        ("cache_slot_stride", |p| p.cache_slot_stride = 577),
        ("cache_slot_stride", |p| p.cache_slot_stride = 1 << 39),
        ("cache_page_stride", |p| p.cache_page_stride = 8),
        ("cache_page_stride", |p| p.cache_page_stride = 1 << 39),
        ("block_table", |p| p.block_table = std::ptr::null()),
        ("kv_lens", |p| p.kv_lens = p.kv_lens.wrapping_byte_add(1)),
        ("cu_q_lens", |p| {
            p.cu_q_lens = std::ptr::dangling::<u8>().wrapping_add(1).cast()
        }),
        ("lse", |p| p.lse = p.lse.wrapping_byte_add(2)),
        ("lse_head_stride", |p| p.lse_head_stride = 1),
        ("lse_head_stride", |p| p.lse_head_stride = 1 << 39),
        ("softmax_scale", |p| p.softmax_scale = 0.0),
        ("softmax_scale", |p| p.softmax_scale = f32::NAN),
        ("softmax_scale", |p| p.softmax_scale = f32::INFINITY),
        ("workspace", |p| p.workspace = std::ptr::null_mut()),
        ("workspace", |p| {
            p.workspace = p.workspace.wrapping_byte_add(16)
        }),
        ("heads", |p| (p.heads, p.query_len) = (i32::MAX, i32::MAX)),
        ("query_len", |p| p.query_len = i32::MAX),
        ("requests", |p| p.requests = 4096),
        ("requests", |p| p.requests = i32::MIN),
        ("page_size", |p| p.page_size = i32::MAX),
        ("pages", |p| p.pages = i64::MAX),
        ("max_pages", |p| p.max_pages = i32::MAX),
        ("q_latent_token_stride", |p| {
            p.q_latent_token_stride = TOO_WIDE
        }),
        ("q_latent_head_stride", |p| {
            p.q_latent_head_stride = TOO_WIDE
        }),
        ("q_rope_token_stride", |p| p.q_rope_token_stride = 1 << 62),
        ("q_rope_head_stride", |p| p.q_rope_head_stride = 1 << 62),
        ("out_token_stride", |p| p.out_token_stride = TOO_WIDE),
        ("cache_rope", |p| {
            p.cache_rope = p.cache_rope.wrapping_byte_add(8)
        }),
        ("cache_rope_slot_stride", |p| {
            p.cache_rope_slot_stride = TOO_WIDE
        }),
        ("block_table_stride", |p| p.block_table_stride = i64::MAX),
        ("lse_head_stride", |p| p.lse_head_stride = i64::MAX),
    ];
    // SAFETY: the parameters live on the caller's stack. Only launched kernels read the memory that
    // they point to, and a refused call launches none.
    each_is_refused(&decode(), wrong, |params| unsafe {
        raw::mla_decode_sm90(params, std::ptr::null_mut())
    });
}

#[test]
fn the_workspace_of_a_decode_is_refused_before_its_rows_are_multiplied() {
    for (wrong, expected) in [
        ([i32::MAX; 2], "heads: given 2147483647, accepted 1..=128"),
        ([16, 17], "query_len: given 17, accepted 1..=16"),
    ] {
        let mut params = decode();
        [params.heads, params.query_len] = wrong;
        let mut bytes = 0;
        // SAFETY: both values live on this stack.
        let status = unsafe { raw::mla_decode_sm90_workspace(&params, &mut bytes) };
        let error = checked("workspace", status).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn prefill_refuses_each_bad_field() {
    let wrong: &[WrongField<MlaPrefillParams>] = &[
        ("heads", |p| p.heads = 0),
        ("heads", |p| p.heads = 65536),
        ("requests", |p| p.requests = 0),
        ("query_tokens", |p| p.query_tokens = -1),
        ("key_tokens", |p| p.key_tokens = -1),
        ("max_query_len", |p| p.max_query_len = -1),
        ("max_query_len", |p| p.max_query_len = i32::MAX),
        ("max_key_len", |p| p.max_key_len = -1),
        ("dtype", |p| p.dtype = raw::MLA_DTYPE_F32 as i32),
        ("query", |p| p.query = std::ptr::null()),
        ("query", |p| p.query = p.query.wrapping_byte_add(8)),
        ("key_nope", |p| p.key_nope = std::ptr::null()),
        ("key_nope", |p| p.key_nope = p.key_nope.wrapping_byte_add(2)),
        ("key_rope", |p| p.key_rope = std::ptr::null()),
        ("key_rope", |p| p.key_rope = p.key_rope.wrapping_byte_add(2)),
        ("value", |p| p.value = std::ptr::null()),
        ("value", |p| p.value = p.value.wrapping_byte_add(4)),
        ("out", |p| p.out = std::ptr::null_mut()),
        ("out", |p| p.out = p.out.wrapping_byte_add(2)),
        ("query_token_stride", |p| p.query_token_stride = 0),
        ("query_token_stride", |p| p.query_token_stride = 385),
        ("query_head_stride", |p| p.query_head_stride = -8),
        ("key_nope_token_stride", |p| {
            p.key_nope_token_stride = 1 << 39
        }),
        ("key_nope_head_stride", |p| p.key_nope_head_stride = 0),
        ("key_rope_token_stride", |p| p.key_rope_token_stride = 4),
        ("key_rope_head_stride", |p| p.key_rope_head_stride = -8),
        ("value_token_stride", |p| p.value_token_stride = 0),
        ("value_head_stride", |p| p.value_head_stride = 129),
        ("out_token_stride", |p| p.out_token_stride = 0),
        ("out_head_stride", |p| p.out_head_stride = 2),
        ("cu_query_lens", |p| p.cu_query_lens = std::ptr::null()),
        ("cu_key_lens", |p| {
            p.cu_key_lens = p.cu_key_lens.wrapping_byte_add(2)
        }),
        ("lse", |p| p.lse = p.lse.wrapping_byte_add(2)),
        ("lse_head_stride", |p| p.lse_head_stride = 129),
        ("lse_head_stride", |p| p.lse_head_stride = 1 << 39),
        ("softmax_scale", |p| p.softmax_scale = 0.0),
        ("softmax_scale", |p| p.softmax_scale = f32::NAN),
        ("workspace", |p| p.workspace = std::ptr::null_mut()),
        ("workspace", |p| {
            p.workspace = p.workspace.wrapping_byte_add(16)
        }),
        ("requests", |p| p.requests = i32::MIN),
        // These are 2^31 rows of 2^39 elements, which is 2^71 bytes.
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
        // This is one row more than there is room for before the tensor.
        ("max_key_len", |p| {
            p.value_token_stride = 1 << 20;
            p.max_key_len = (PLACE >> 21) as i32 + 1;
        }),
        ("query_token_stride", |p| p.query_token_stride = TOO_WIDE),
        ("value_head_stride", |p| p.value_head_stride = i64::MAX - 7),
        ("lse_head_stride", |p| p.lse_head_stride = i64::MAX),
    ];
    // SAFETY: the parameters live on the caller's stack. Only launched kernels read the memory that
    // they point to, and a refused call launches none.
    each_is_refused(&prefill(), wrong, |params| unsafe {
        raw::mla_prefill_sm90(params, std::ptr::null_mut())
    });
}
