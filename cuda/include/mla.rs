// cuda/include/mla.h
pub const MLA_PREFILL_COUNTER_BYTES: u32 = 4096;
pub const MLA_OK: MlaStatusCode = 0;
pub const MLA_BAD_ARGUMENT: MlaStatusCode = 1;
pub const MLA_CUDA_ERROR: MlaStatusCode = 2;
pub const MLA_UNSUPPORTED_DEVICE: MlaStatusCode = 3;
pub type MlaStatusCode = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaStatus {
    pub code: i32,
    pub cuda_error: i32,
    pub field: *const ::core::ffi::c_char,
    pub given: i64,
    pub accepted: *const ::core::ffi::c_char,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaStatus"][::core::mem::size_of::<MlaStatus>() - 32usize];
    ["Alignment of MlaStatus"][::core::mem::align_of::<MlaStatus>() - 8usize];
    [
        "Offset of field: MlaStatus::code",
    ][::core::mem::offset_of!(MlaStatus, code) - 0usize];
    [
        "Offset of field: MlaStatus::cuda_error",
    ][::core::mem::offset_of!(MlaStatus, cuda_error) - 4usize];
    [
        "Offset of field: MlaStatus::field",
    ][::core::mem::offset_of!(MlaStatus, field) - 8usize];
    [
        "Offset of field: MlaStatus::given",
    ][::core::mem::offset_of!(MlaStatus, given) - 16usize];
    [
        "Offset of field: MlaStatus::accepted",
    ][::core::mem::offset_of!(MlaStatus, accepted) - 24usize];
};
impl Default for MlaStatus {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
pub const MLA_DTYPE_BF16: MlaDtype = 0;
pub const MLA_DTYPE_F16: MlaDtype = 1;
pub const MLA_DTYPE_F32: MlaDtype = 3;
pub type MlaDtype = ::core::ffi::c_uint;
pub const MLA_CACHE_F32: MlaCacheFormat = 0;
pub const MLA_CACHE_F16: MlaCacheFormat = 1;
pub const MLA_CACHE_BF16: MlaCacheFormat = 2;
pub const MLA_CACHE_FP8: MlaCacheFormat = 3;
pub const MLA_CACHE_FP8_DS_MLA: MlaCacheFormat = 4;
pub const MLA_CACHE_FP8_PER_TOKEN: MlaCacheFormat = 5;
pub type MlaCacheFormat = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaDecodeParams {
    pub q_latent: *const ::core::ffi::c_void,
    pub q_rope: *const ::core::ffi::c_void,
    pub cache: *const ::core::ffi::c_void,
    pub cache_rope: *const ::core::ffi::c_void,
    pub block_table: *const i32,
    pub kv_lens: *const i32,
    pub cu_q_lens: *const i32,
    pub out: *mut ::core::ffi::c_void,
    pub lse: *mut f32,
    pub workspace: *mut ::core::ffi::c_void,
    pub workspace_bytes: usize,
    pub q_latent_token_stride: i64,
    pub q_latent_head_stride: i64,
    pub q_rope_token_stride: i64,
    pub q_rope_head_stride: i64,
    pub cache_page_stride: i64,
    pub cache_slot_stride: i64,
    pub cache_rope_page_stride: i64,
    pub cache_rope_slot_stride: i64,
    pub block_table_stride: i64,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub lse_head_stride: i64,
    pub pages: i64,
    pub requests: i32,
    pub tokens: i32,
    pub heads: i32,
    pub query_len: i32,
    pub page_size: i32,
    pub max_pages: i32,
    pub latent_dim: i32,
    pub rope_dim: i32,
    pub q_dtype: i32,
    pub cache_format: i32,
    pub causal: i32,
    pub softmax_scale: f32,
    pub cache_scale: f32,
    pub split_patience: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaDecodeParams"][::core::mem::size_of::<MlaDecodeParams>() - 248usize];
    [
        "Alignment of MlaDecodeParams",
    ][::core::mem::align_of::<MlaDecodeParams>() - 8usize];
    [
        "Offset of field: MlaDecodeParams::q_latent",
    ][::core::mem::offset_of!(MlaDecodeParams, q_latent) - 0usize];
    [
        "Offset of field: MlaDecodeParams::q_rope",
    ][::core::mem::offset_of!(MlaDecodeParams, q_rope) - 8usize];
    [
        "Offset of field: MlaDecodeParams::cache",
    ][::core::mem::offset_of!(MlaDecodeParams, cache) - 16usize];
    [
        "Offset of field: MlaDecodeParams::cache_rope",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_rope) - 24usize];
    [
        "Offset of field: MlaDecodeParams::block_table",
    ][::core::mem::offset_of!(MlaDecodeParams, block_table) - 32usize];
    [
        "Offset of field: MlaDecodeParams::kv_lens",
    ][::core::mem::offset_of!(MlaDecodeParams, kv_lens) - 40usize];
    [
        "Offset of field: MlaDecodeParams::cu_q_lens",
    ][::core::mem::offset_of!(MlaDecodeParams, cu_q_lens) - 48usize];
    [
        "Offset of field: MlaDecodeParams::out",
    ][::core::mem::offset_of!(MlaDecodeParams, out) - 56usize];
    [
        "Offset of field: MlaDecodeParams::lse",
    ][::core::mem::offset_of!(MlaDecodeParams, lse) - 64usize];
    [
        "Offset of field: MlaDecodeParams::workspace",
    ][::core::mem::offset_of!(MlaDecodeParams, workspace) - 72usize];
    [
        "Offset of field: MlaDecodeParams::workspace_bytes",
    ][::core::mem::offset_of!(MlaDecodeParams, workspace_bytes) - 80usize];
    [
        "Offset of field: MlaDecodeParams::q_latent_token_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, q_latent_token_stride) - 88usize];
    [
        "Offset of field: MlaDecodeParams::q_latent_head_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, q_latent_head_stride) - 96usize];
    [
        "Offset of field: MlaDecodeParams::q_rope_token_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, q_rope_token_stride) - 104usize];
    [
        "Offset of field: MlaDecodeParams::q_rope_head_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, q_rope_head_stride) - 112usize];
    [
        "Offset of field: MlaDecodeParams::cache_page_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_page_stride) - 120usize];
    [
        "Offset of field: MlaDecodeParams::cache_slot_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_slot_stride) - 128usize];
    [
        "Offset of field: MlaDecodeParams::cache_rope_page_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_rope_page_stride) - 136usize];
    [
        "Offset of field: MlaDecodeParams::cache_rope_slot_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_rope_slot_stride) - 144usize];
    [
        "Offset of field: MlaDecodeParams::block_table_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, block_table_stride) - 152usize];
    [
        "Offset of field: MlaDecodeParams::out_token_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, out_token_stride) - 160usize];
    [
        "Offset of field: MlaDecodeParams::out_head_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, out_head_stride) - 168usize];
    [
        "Offset of field: MlaDecodeParams::lse_head_stride",
    ][::core::mem::offset_of!(MlaDecodeParams, lse_head_stride) - 176usize];
    [
        "Offset of field: MlaDecodeParams::pages",
    ][::core::mem::offset_of!(MlaDecodeParams, pages) - 184usize];
    [
        "Offset of field: MlaDecodeParams::requests",
    ][::core::mem::offset_of!(MlaDecodeParams, requests) - 192usize];
    [
        "Offset of field: MlaDecodeParams::tokens",
    ][::core::mem::offset_of!(MlaDecodeParams, tokens) - 196usize];
    [
        "Offset of field: MlaDecodeParams::heads",
    ][::core::mem::offset_of!(MlaDecodeParams, heads) - 200usize];
    [
        "Offset of field: MlaDecodeParams::query_len",
    ][::core::mem::offset_of!(MlaDecodeParams, query_len) - 204usize];
    [
        "Offset of field: MlaDecodeParams::page_size",
    ][::core::mem::offset_of!(MlaDecodeParams, page_size) - 208usize];
    [
        "Offset of field: MlaDecodeParams::max_pages",
    ][::core::mem::offset_of!(MlaDecodeParams, max_pages) - 212usize];
    [
        "Offset of field: MlaDecodeParams::latent_dim",
    ][::core::mem::offset_of!(MlaDecodeParams, latent_dim) - 216usize];
    [
        "Offset of field: MlaDecodeParams::rope_dim",
    ][::core::mem::offset_of!(MlaDecodeParams, rope_dim) - 220usize];
    [
        "Offset of field: MlaDecodeParams::q_dtype",
    ][::core::mem::offset_of!(MlaDecodeParams, q_dtype) - 224usize];
    [
        "Offset of field: MlaDecodeParams::cache_format",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_format) - 228usize];
    [
        "Offset of field: MlaDecodeParams::causal",
    ][::core::mem::offset_of!(MlaDecodeParams, causal) - 232usize];
    [
        "Offset of field: MlaDecodeParams::softmax_scale",
    ][::core::mem::offset_of!(MlaDecodeParams, softmax_scale) - 236usize];
    [
        "Offset of field: MlaDecodeParams::cache_scale",
    ][::core::mem::offset_of!(MlaDecodeParams, cache_scale) - 240usize];
    [
        "Offset of field: MlaDecodeParams::split_patience",
    ][::core::mem::offset_of!(MlaDecodeParams, split_patience) - 244usize];
};
impl Default for MlaDecodeParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaListedCache {
    pub cache: *const ::core::ffi::c_void,
    pub cache_rope: *const ::core::ffi::c_void,
    pub lists: *const i32,
    pub counts: *const i32,
    pub cache_page_stride: i64,
    pub cache_slot_stride: i64,
    pub cache_rope_page_stride: i64,
    pub cache_rope_slot_stride: i64,
    pub list_stride: i64,
    pub pages: i64,
    pub width: i32,
    pub page_size: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaListedCache"][::core::mem::size_of::<MlaListedCache>() - 88usize];
    ["Alignment of MlaListedCache"][::core::mem::align_of::<MlaListedCache>() - 8usize];
    [
        "Offset of field: MlaListedCache::cache",
    ][::core::mem::offset_of!(MlaListedCache, cache) - 0usize];
    [
        "Offset of field: MlaListedCache::cache_rope",
    ][::core::mem::offset_of!(MlaListedCache, cache_rope) - 8usize];
    [
        "Offset of field: MlaListedCache::lists",
    ][::core::mem::offset_of!(MlaListedCache, lists) - 16usize];
    [
        "Offset of field: MlaListedCache::counts",
    ][::core::mem::offset_of!(MlaListedCache, counts) - 24usize];
    [
        "Offset of field: MlaListedCache::cache_page_stride",
    ][::core::mem::offset_of!(MlaListedCache, cache_page_stride) - 32usize];
    [
        "Offset of field: MlaListedCache::cache_slot_stride",
    ][::core::mem::offset_of!(MlaListedCache, cache_slot_stride) - 40usize];
    [
        "Offset of field: MlaListedCache::cache_rope_page_stride",
    ][::core::mem::offset_of!(MlaListedCache, cache_rope_page_stride) - 48usize];
    [
        "Offset of field: MlaListedCache::cache_rope_slot_stride",
    ][::core::mem::offset_of!(MlaListedCache, cache_rope_slot_stride) - 56usize];
    [
        "Offset of field: MlaListedCache::list_stride",
    ][::core::mem::offset_of!(MlaListedCache, list_stride) - 64usize];
    [
        "Offset of field: MlaListedCache::pages",
    ][::core::mem::offset_of!(MlaListedCache, pages) - 72usize];
    [
        "Offset of field: MlaListedCache::width",
    ][::core::mem::offset_of!(MlaListedCache, width) - 80usize];
    [
        "Offset of field: MlaListedCache::page_size",
    ][::core::mem::offset_of!(MlaListedCache, page_size) - 84usize];
};
impl Default for MlaListedCache {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaSparseParams {
    pub q_latent: *const ::core::ffi::c_void,
    pub q_rope: *const ::core::ffi::c_void,
    pub cache: *const ::core::ffi::c_void,
    pub cache_rope: *const ::core::ffi::c_void,
    pub lists: *const i32,
    pub counts: *const i32,
    pub second: MlaListedCache,
    pub block_table: *const i32,
    pub seq_lens: *const i32,
    pub query_starts: *const i32,
    pub sinks: *const f32,
    pub out: *mut ::core::ffi::c_void,
    pub lse: *mut f32,
    pub q_latent_token_stride: i64,
    pub q_latent_head_stride: i64,
    pub q_rope_token_stride: i64,
    pub q_rope_head_stride: i64,
    pub cache_page_stride: i64,
    pub cache_slot_stride: i64,
    pub cache_rope_page_stride: i64,
    pub cache_rope_slot_stride: i64,
    pub list_stride: i64,
    pub block_table_stride: i64,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub lse_head_stride: i64,
    pub pages: i64,
    pub dense_within: i32,
    pub requests: i32,
    pub tokens: i32,
    pub heads: i32,
    pub width: i32,
    pub page_size: i32,
    pub latent_dim: i32,
    pub rope_dim: i32,
    pub q_dtype: i32,
    pub cache_format: i32,
    pub softmax_scale: f32,
    pub cache_scale: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaSparseParams"][::core::mem::size_of::<MlaSparseParams>() - 344usize];
    [
        "Alignment of MlaSparseParams",
    ][::core::mem::align_of::<MlaSparseParams>() - 8usize];
    [
        "Offset of field: MlaSparseParams::q_latent",
    ][::core::mem::offset_of!(MlaSparseParams, q_latent) - 0usize];
    [
        "Offset of field: MlaSparseParams::q_rope",
    ][::core::mem::offset_of!(MlaSparseParams, q_rope) - 8usize];
    [
        "Offset of field: MlaSparseParams::cache",
    ][::core::mem::offset_of!(MlaSparseParams, cache) - 16usize];
    [
        "Offset of field: MlaSparseParams::cache_rope",
    ][::core::mem::offset_of!(MlaSparseParams, cache_rope) - 24usize];
    [
        "Offset of field: MlaSparseParams::lists",
    ][::core::mem::offset_of!(MlaSparseParams, lists) - 32usize];
    [
        "Offset of field: MlaSparseParams::counts",
    ][::core::mem::offset_of!(MlaSparseParams, counts) - 40usize];
    [
        "Offset of field: MlaSparseParams::second",
    ][::core::mem::offset_of!(MlaSparseParams, second) - 48usize];
    [
        "Offset of field: MlaSparseParams::block_table",
    ][::core::mem::offset_of!(MlaSparseParams, block_table) - 136usize];
    [
        "Offset of field: MlaSparseParams::seq_lens",
    ][::core::mem::offset_of!(MlaSparseParams, seq_lens) - 144usize];
    [
        "Offset of field: MlaSparseParams::query_starts",
    ][::core::mem::offset_of!(MlaSparseParams, query_starts) - 152usize];
    [
        "Offset of field: MlaSparseParams::sinks",
    ][::core::mem::offset_of!(MlaSparseParams, sinks) - 160usize];
    [
        "Offset of field: MlaSparseParams::out",
    ][::core::mem::offset_of!(MlaSparseParams, out) - 168usize];
    [
        "Offset of field: MlaSparseParams::lse",
    ][::core::mem::offset_of!(MlaSparseParams, lse) - 176usize];
    [
        "Offset of field: MlaSparseParams::q_latent_token_stride",
    ][::core::mem::offset_of!(MlaSparseParams, q_latent_token_stride) - 184usize];
    [
        "Offset of field: MlaSparseParams::q_latent_head_stride",
    ][::core::mem::offset_of!(MlaSparseParams, q_latent_head_stride) - 192usize];
    [
        "Offset of field: MlaSparseParams::q_rope_token_stride",
    ][::core::mem::offset_of!(MlaSparseParams, q_rope_token_stride) - 200usize];
    [
        "Offset of field: MlaSparseParams::q_rope_head_stride",
    ][::core::mem::offset_of!(MlaSparseParams, q_rope_head_stride) - 208usize];
    [
        "Offset of field: MlaSparseParams::cache_page_stride",
    ][::core::mem::offset_of!(MlaSparseParams, cache_page_stride) - 216usize];
    [
        "Offset of field: MlaSparseParams::cache_slot_stride",
    ][::core::mem::offset_of!(MlaSparseParams, cache_slot_stride) - 224usize];
    [
        "Offset of field: MlaSparseParams::cache_rope_page_stride",
    ][::core::mem::offset_of!(MlaSparseParams, cache_rope_page_stride) - 232usize];
    [
        "Offset of field: MlaSparseParams::cache_rope_slot_stride",
    ][::core::mem::offset_of!(MlaSparseParams, cache_rope_slot_stride) - 240usize];
    [
        "Offset of field: MlaSparseParams::list_stride",
    ][::core::mem::offset_of!(MlaSparseParams, list_stride) - 248usize];
    [
        "Offset of field: MlaSparseParams::block_table_stride",
    ][::core::mem::offset_of!(MlaSparseParams, block_table_stride) - 256usize];
    [
        "Offset of field: MlaSparseParams::out_token_stride",
    ][::core::mem::offset_of!(MlaSparseParams, out_token_stride) - 264usize];
    [
        "Offset of field: MlaSparseParams::out_head_stride",
    ][::core::mem::offset_of!(MlaSparseParams, out_head_stride) - 272usize];
    [
        "Offset of field: MlaSparseParams::lse_head_stride",
    ][::core::mem::offset_of!(MlaSparseParams, lse_head_stride) - 280usize];
    [
        "Offset of field: MlaSparseParams::pages",
    ][::core::mem::offset_of!(MlaSparseParams, pages) - 288usize];
    [
        "Offset of field: MlaSparseParams::dense_within",
    ][::core::mem::offset_of!(MlaSparseParams, dense_within) - 296usize];
    [
        "Offset of field: MlaSparseParams::requests",
    ][::core::mem::offset_of!(MlaSparseParams, requests) - 300usize];
    [
        "Offset of field: MlaSparseParams::tokens",
    ][::core::mem::offset_of!(MlaSparseParams, tokens) - 304usize];
    [
        "Offset of field: MlaSparseParams::heads",
    ][::core::mem::offset_of!(MlaSparseParams, heads) - 308usize];
    [
        "Offset of field: MlaSparseParams::width",
    ][::core::mem::offset_of!(MlaSparseParams, width) - 312usize];
    [
        "Offset of field: MlaSparseParams::page_size",
    ][::core::mem::offset_of!(MlaSparseParams, page_size) - 316usize];
    [
        "Offset of field: MlaSparseParams::latent_dim",
    ][::core::mem::offset_of!(MlaSparseParams, latent_dim) - 320usize];
    [
        "Offset of field: MlaSparseParams::rope_dim",
    ][::core::mem::offset_of!(MlaSparseParams, rope_dim) - 324usize];
    [
        "Offset of field: MlaSparseParams::q_dtype",
    ][::core::mem::offset_of!(MlaSparseParams, q_dtype) - 328usize];
    [
        "Offset of field: MlaSparseParams::cache_format",
    ][::core::mem::offset_of!(MlaSparseParams, cache_format) - 332usize];
    [
        "Offset of field: MlaSparseParams::softmax_scale",
    ][::core::mem::offset_of!(MlaSparseParams, softmax_scale) - 336usize];
    [
        "Offset of field: MlaSparseParams::cache_scale",
    ][::core::mem::offset_of!(MlaSparseParams, cache_scale) - 340usize];
};
impl Default for MlaSparseParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaPrefillParams {
    pub query: *const ::core::ffi::c_void,
    pub key_nope: *const ::core::ffi::c_void,
    pub key_rope: *const ::core::ffi::c_void,
    pub value: *const ::core::ffi::c_void,
    pub out: *mut ::core::ffi::c_void,
    pub lse: *mut f32,
    pub cu_query_lens: *const i32,
    pub cu_key_lens: *const i32,
    pub workspace: *mut ::core::ffi::c_void,
    pub workspace_bytes: usize,
    pub query_token_stride: i64,
    pub query_head_stride: i64,
    pub key_nope_token_stride: i64,
    pub key_nope_head_stride: i64,
    pub key_rope_token_stride: i64,
    pub key_rope_head_stride: i64,
    pub value_token_stride: i64,
    pub value_head_stride: i64,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub lse_head_stride: i64,
    pub query_tokens: i32,
    pub key_tokens: i32,
    pub requests: i32,
    pub heads: i32,
    pub max_query_len: i32,
    pub max_key_len: i32,
    pub nope_dim: i32,
    pub rope_dim: i32,
    pub value_dim: i32,
    pub dtype: i32,
    pub causal: i32,
    pub softmax_scale: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaPrefillParams"][::core::mem::size_of::<MlaPrefillParams>() - 216usize];
    [
        "Alignment of MlaPrefillParams",
    ][::core::mem::align_of::<MlaPrefillParams>() - 8usize];
    [
        "Offset of field: MlaPrefillParams::query",
    ][::core::mem::offset_of!(MlaPrefillParams, query) - 0usize];
    [
        "Offset of field: MlaPrefillParams::key_nope",
    ][::core::mem::offset_of!(MlaPrefillParams, key_nope) - 8usize];
    [
        "Offset of field: MlaPrefillParams::key_rope",
    ][::core::mem::offset_of!(MlaPrefillParams, key_rope) - 16usize];
    [
        "Offset of field: MlaPrefillParams::value",
    ][::core::mem::offset_of!(MlaPrefillParams, value) - 24usize];
    [
        "Offset of field: MlaPrefillParams::out",
    ][::core::mem::offset_of!(MlaPrefillParams, out) - 32usize];
    [
        "Offset of field: MlaPrefillParams::lse",
    ][::core::mem::offset_of!(MlaPrefillParams, lse) - 40usize];
    [
        "Offset of field: MlaPrefillParams::cu_query_lens",
    ][::core::mem::offset_of!(MlaPrefillParams, cu_query_lens) - 48usize];
    [
        "Offset of field: MlaPrefillParams::cu_key_lens",
    ][::core::mem::offset_of!(MlaPrefillParams, cu_key_lens) - 56usize];
    [
        "Offset of field: MlaPrefillParams::workspace",
    ][::core::mem::offset_of!(MlaPrefillParams, workspace) - 64usize];
    [
        "Offset of field: MlaPrefillParams::workspace_bytes",
    ][::core::mem::offset_of!(MlaPrefillParams, workspace_bytes) - 72usize];
    [
        "Offset of field: MlaPrefillParams::query_token_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, query_token_stride) - 80usize];
    [
        "Offset of field: MlaPrefillParams::query_head_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, query_head_stride) - 88usize];
    [
        "Offset of field: MlaPrefillParams::key_nope_token_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, key_nope_token_stride) - 96usize];
    [
        "Offset of field: MlaPrefillParams::key_nope_head_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, key_nope_head_stride) - 104usize];
    [
        "Offset of field: MlaPrefillParams::key_rope_token_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, key_rope_token_stride) - 112usize];
    [
        "Offset of field: MlaPrefillParams::key_rope_head_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, key_rope_head_stride) - 120usize];
    [
        "Offset of field: MlaPrefillParams::value_token_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, value_token_stride) - 128usize];
    [
        "Offset of field: MlaPrefillParams::value_head_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, value_head_stride) - 136usize];
    [
        "Offset of field: MlaPrefillParams::out_token_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, out_token_stride) - 144usize];
    [
        "Offset of field: MlaPrefillParams::out_head_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, out_head_stride) - 152usize];
    [
        "Offset of field: MlaPrefillParams::lse_head_stride",
    ][::core::mem::offset_of!(MlaPrefillParams, lse_head_stride) - 160usize];
    [
        "Offset of field: MlaPrefillParams::query_tokens",
    ][::core::mem::offset_of!(MlaPrefillParams, query_tokens) - 168usize];
    [
        "Offset of field: MlaPrefillParams::key_tokens",
    ][::core::mem::offset_of!(MlaPrefillParams, key_tokens) - 172usize];
    [
        "Offset of field: MlaPrefillParams::requests",
    ][::core::mem::offset_of!(MlaPrefillParams, requests) - 176usize];
    [
        "Offset of field: MlaPrefillParams::heads",
    ][::core::mem::offset_of!(MlaPrefillParams, heads) - 180usize];
    [
        "Offset of field: MlaPrefillParams::max_query_len",
    ][::core::mem::offset_of!(MlaPrefillParams, max_query_len) - 184usize];
    [
        "Offset of field: MlaPrefillParams::max_key_len",
    ][::core::mem::offset_of!(MlaPrefillParams, max_key_len) - 188usize];
    [
        "Offset of field: MlaPrefillParams::nope_dim",
    ][::core::mem::offset_of!(MlaPrefillParams, nope_dim) - 192usize];
    [
        "Offset of field: MlaPrefillParams::rope_dim",
    ][::core::mem::offset_of!(MlaPrefillParams, rope_dim) - 196usize];
    [
        "Offset of field: MlaPrefillParams::value_dim",
    ][::core::mem::offset_of!(MlaPrefillParams, value_dim) - 200usize];
    [
        "Offset of field: MlaPrefillParams::dtype",
    ][::core::mem::offset_of!(MlaPrefillParams, dtype) - 204usize];
    [
        "Offset of field: MlaPrefillParams::causal",
    ][::core::mem::offset_of!(MlaPrefillParams, causal) - 208usize];
    [
        "Offset of field: MlaPrefillParams::softmax_scale",
    ][::core::mem::offset_of!(MlaPrefillParams, softmax_scale) - 212usize];
};
impl Default for MlaPrefillParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
pub const MLA_ROTARY_INTERLEAVED: MlaRotaryStyle = 0;
pub const MLA_ROTARY_HALVES: MlaRotaryStyle = 1;
pub type MlaRotaryStyle = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaCacheWriteParams {
    pub latent: *const ::core::ffi::c_void,
    pub rope: *const ::core::ffi::c_void,
    pub slots: *const i64,
    pub cache: *mut ::core::ffi::c_void,
    pub cache_rope: *mut ::core::ffi::c_void,
    pub positions: *const i64,
    pub cos: *const f32,
    pub sin: *const f32,
    pub query_rope: *const ::core::ffi::c_void,
    pub query_rope_out: *mut ::core::ffi::c_void,
    pub latent_token_stride: i64,
    pub rope_token_stride: i64,
    pub cache_page_stride: i64,
    pub cache_slot_stride: i64,
    pub cache_rope_page_stride: i64,
    pub cache_rope_slot_stride: i64,
    pub table_stride: i64,
    pub query_token_stride: i64,
    pub query_head_stride: i64,
    pub query_out_token_stride: i64,
    pub query_out_head_stride: i64,
    pub pages: i64,
    pub positions_len: i64,
    pub tokens: i32,
    pub page_size: i32,
    pub heads: i32,
    pub latent_dim: i32,
    pub rope_dim: i32,
    pub dtype: i32,
    pub cache_format: i32,
    pub rotary_style: i32,
    pub cache_scale: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaCacheWriteParams",
    ][::core::mem::size_of::<MlaCacheWriteParams>() - 224usize];
    [
        "Alignment of MlaCacheWriteParams",
    ][::core::mem::align_of::<MlaCacheWriteParams>() - 8usize];
    [
        "Offset of field: MlaCacheWriteParams::latent",
    ][::core::mem::offset_of!(MlaCacheWriteParams, latent) - 0usize];
    [
        "Offset of field: MlaCacheWriteParams::rope",
    ][::core::mem::offset_of!(MlaCacheWriteParams, rope) - 8usize];
    [
        "Offset of field: MlaCacheWriteParams::slots",
    ][::core::mem::offset_of!(MlaCacheWriteParams, slots) - 16usize];
    [
        "Offset of field: MlaCacheWriteParams::cache",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache) - 24usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_rope",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_rope) - 32usize];
    [
        "Offset of field: MlaCacheWriteParams::positions",
    ][::core::mem::offset_of!(MlaCacheWriteParams, positions) - 40usize];
    [
        "Offset of field: MlaCacheWriteParams::cos",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cos) - 48usize];
    [
        "Offset of field: MlaCacheWriteParams::sin",
    ][::core::mem::offset_of!(MlaCacheWriteParams, sin) - 56usize];
    [
        "Offset of field: MlaCacheWriteParams::query_rope",
    ][::core::mem::offset_of!(MlaCacheWriteParams, query_rope) - 64usize];
    [
        "Offset of field: MlaCacheWriteParams::query_rope_out",
    ][::core::mem::offset_of!(MlaCacheWriteParams, query_rope_out) - 72usize];
    [
        "Offset of field: MlaCacheWriteParams::latent_token_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, latent_token_stride) - 80usize];
    [
        "Offset of field: MlaCacheWriteParams::rope_token_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, rope_token_stride) - 88usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_page_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_page_stride) - 96usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_slot_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_slot_stride) - 104usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_rope_page_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_rope_page_stride) - 112usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_rope_slot_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_rope_slot_stride) - 120usize];
    [
        "Offset of field: MlaCacheWriteParams::table_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, table_stride) - 128usize];
    [
        "Offset of field: MlaCacheWriteParams::query_token_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, query_token_stride) - 136usize];
    [
        "Offset of field: MlaCacheWriteParams::query_head_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, query_head_stride) - 144usize];
    [
        "Offset of field: MlaCacheWriteParams::query_out_token_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, query_out_token_stride) - 152usize];
    [
        "Offset of field: MlaCacheWriteParams::query_out_head_stride",
    ][::core::mem::offset_of!(MlaCacheWriteParams, query_out_head_stride) - 160usize];
    [
        "Offset of field: MlaCacheWriteParams::pages",
    ][::core::mem::offset_of!(MlaCacheWriteParams, pages) - 168usize];
    [
        "Offset of field: MlaCacheWriteParams::positions_len",
    ][::core::mem::offset_of!(MlaCacheWriteParams, positions_len) - 176usize];
    [
        "Offset of field: MlaCacheWriteParams::tokens",
    ][::core::mem::offset_of!(MlaCacheWriteParams, tokens) - 184usize];
    [
        "Offset of field: MlaCacheWriteParams::page_size",
    ][::core::mem::offset_of!(MlaCacheWriteParams, page_size) - 188usize];
    [
        "Offset of field: MlaCacheWriteParams::heads",
    ][::core::mem::offset_of!(MlaCacheWriteParams, heads) - 192usize];
    [
        "Offset of field: MlaCacheWriteParams::latent_dim",
    ][::core::mem::offset_of!(MlaCacheWriteParams, latent_dim) - 196usize];
    [
        "Offset of field: MlaCacheWriteParams::rope_dim",
    ][::core::mem::offset_of!(MlaCacheWriteParams, rope_dim) - 200usize];
    [
        "Offset of field: MlaCacheWriteParams::dtype",
    ][::core::mem::offset_of!(MlaCacheWriteParams, dtype) - 204usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_format",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_format) - 208usize];
    [
        "Offset of field: MlaCacheWriteParams::rotary_style",
    ][::core::mem::offset_of!(MlaCacheWriteParams, rotary_style) - 212usize];
    [
        "Offset of field: MlaCacheWriteParams::cache_scale",
    ][::core::mem::offset_of!(MlaCacheWriteParams, cache_scale) - 216usize];
};
impl Default for MlaCacheWriteParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_cache_write"]
    pub fn mla_cache_write(
        params: *const MlaCacheWriteParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaCacheGatherParams {
    pub cache: *const ::core::ffi::c_void,
    pub cache_rope: *const ::core::ffi::c_void,
    pub block_table: *const i32,
    pub token_starts: *const i32,
    pub row_starts: *const i32,
    pub latent: *mut ::core::ffi::c_void,
    pub rope: *mut ::core::ffi::c_void,
    pub cache_page_stride: i64,
    pub cache_slot_stride: i64,
    pub cache_rope_page_stride: i64,
    pub cache_rope_slot_stride: i64,
    pub block_table_stride: i64,
    pub latent_row_stride: i64,
    pub rope_row_stride: i64,
    pub pages: i64,
    pub rows: i32,
    pub segments: i32,
    pub max_pages: i32,
    pub page_size: i32,
    pub latent_dim: i32,
    pub rope_dim: i32,
    pub dtype: i32,
    pub cache_format: i32,
    pub cache_scale: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaCacheGatherParams",
    ][::core::mem::size_of::<MlaCacheGatherParams>() - 160usize];
    [
        "Alignment of MlaCacheGatherParams",
    ][::core::mem::align_of::<MlaCacheGatherParams>() - 8usize];
    [
        "Offset of field: MlaCacheGatherParams::cache",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache) - 0usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_rope",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_rope) - 8usize];
    [
        "Offset of field: MlaCacheGatherParams::block_table",
    ][::core::mem::offset_of!(MlaCacheGatherParams, block_table) - 16usize];
    [
        "Offset of field: MlaCacheGatherParams::token_starts",
    ][::core::mem::offset_of!(MlaCacheGatherParams, token_starts) - 24usize];
    [
        "Offset of field: MlaCacheGatherParams::row_starts",
    ][::core::mem::offset_of!(MlaCacheGatherParams, row_starts) - 32usize];
    [
        "Offset of field: MlaCacheGatherParams::latent",
    ][::core::mem::offset_of!(MlaCacheGatherParams, latent) - 40usize];
    [
        "Offset of field: MlaCacheGatherParams::rope",
    ][::core::mem::offset_of!(MlaCacheGatherParams, rope) - 48usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_page_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_page_stride) - 56usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_slot_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_slot_stride) - 64usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_rope_page_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_rope_page_stride) - 72usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_rope_slot_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_rope_slot_stride) - 80usize];
    [
        "Offset of field: MlaCacheGatherParams::block_table_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, block_table_stride) - 88usize];
    [
        "Offset of field: MlaCacheGatherParams::latent_row_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, latent_row_stride) - 96usize];
    [
        "Offset of field: MlaCacheGatherParams::rope_row_stride",
    ][::core::mem::offset_of!(MlaCacheGatherParams, rope_row_stride) - 104usize];
    [
        "Offset of field: MlaCacheGatherParams::pages",
    ][::core::mem::offset_of!(MlaCacheGatherParams, pages) - 112usize];
    [
        "Offset of field: MlaCacheGatherParams::rows",
    ][::core::mem::offset_of!(MlaCacheGatherParams, rows) - 120usize];
    [
        "Offset of field: MlaCacheGatherParams::segments",
    ][::core::mem::offset_of!(MlaCacheGatherParams, segments) - 124usize];
    [
        "Offset of field: MlaCacheGatherParams::max_pages",
    ][::core::mem::offset_of!(MlaCacheGatherParams, max_pages) - 128usize];
    [
        "Offset of field: MlaCacheGatherParams::page_size",
    ][::core::mem::offset_of!(MlaCacheGatherParams, page_size) - 132usize];
    [
        "Offset of field: MlaCacheGatherParams::latent_dim",
    ][::core::mem::offset_of!(MlaCacheGatherParams, latent_dim) - 136usize];
    [
        "Offset of field: MlaCacheGatherParams::rope_dim",
    ][::core::mem::offset_of!(MlaCacheGatherParams, rope_dim) - 140usize];
    [
        "Offset of field: MlaCacheGatherParams::dtype",
    ][::core::mem::offset_of!(MlaCacheGatherParams, dtype) - 144usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_format",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_format) - 148usize];
    [
        "Offset of field: MlaCacheGatherParams::cache_scale",
    ][::core::mem::offset_of!(MlaCacheGatherParams, cache_scale) - 152usize];
};
impl Default for MlaCacheGatherParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_cache_gather"]
    pub fn mla_cache_gather(
        params: *const MlaCacheGatherParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaCacheExpandParams {
    pub rows: MlaCacheGatherParams,
    pub weights: *const ::core::ffi::c_void,
    pub out: *mut ::core::ffi::c_void,
    pub weights_stride: i64,
    pub out_row_stride: i64,
    pub columns: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaCacheExpandParams",
    ][::core::mem::size_of::<MlaCacheExpandParams>() - 200usize];
    [
        "Alignment of MlaCacheExpandParams",
    ][::core::mem::align_of::<MlaCacheExpandParams>() - 8usize];
    [
        "Offset of field: MlaCacheExpandParams::rows",
    ][::core::mem::offset_of!(MlaCacheExpandParams, rows) - 0usize];
    [
        "Offset of field: MlaCacheExpandParams::weights",
    ][::core::mem::offset_of!(MlaCacheExpandParams, weights) - 160usize];
    [
        "Offset of field: MlaCacheExpandParams::out",
    ][::core::mem::offset_of!(MlaCacheExpandParams, out) - 168usize];
    [
        "Offset of field: MlaCacheExpandParams::weights_stride",
    ][::core::mem::offset_of!(MlaCacheExpandParams, weights_stride) - 176usize];
    [
        "Offset of field: MlaCacheExpandParams::out_row_stride",
    ][::core::mem::offset_of!(MlaCacheExpandParams, out_row_stride) - 184usize];
    [
        "Offset of field: MlaCacheExpandParams::columns",
    ][::core::mem::offset_of!(MlaCacheExpandParams, columns) - 192usize];
};
impl Default for MlaCacheExpandParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_cache_expand"]
    pub fn mla_cache_expand(
        params: *const MlaCacheExpandParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaMergeParams {
    pub out: *mut ::core::ffi::c_void,
    pub lse: *mut f32,
    pub other: *const ::core::ffi::c_void,
    pub other_lse: *const f32,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub other_token_stride: i64,
    pub other_head_stride: i64,
    pub lse_head_stride: i64,
    pub other_lse_head_stride: i64,
    pub tokens: i32,
    pub heads: i32,
    pub width: i32,
    pub dtype: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaMergeParams"][::core::mem::size_of::<MlaMergeParams>() - 96usize];
    ["Alignment of MlaMergeParams"][::core::mem::align_of::<MlaMergeParams>() - 8usize];
    [
        "Offset of field: MlaMergeParams::out",
    ][::core::mem::offset_of!(MlaMergeParams, out) - 0usize];
    [
        "Offset of field: MlaMergeParams::lse",
    ][::core::mem::offset_of!(MlaMergeParams, lse) - 8usize];
    [
        "Offset of field: MlaMergeParams::other",
    ][::core::mem::offset_of!(MlaMergeParams, other) - 16usize];
    [
        "Offset of field: MlaMergeParams::other_lse",
    ][::core::mem::offset_of!(MlaMergeParams, other_lse) - 24usize];
    [
        "Offset of field: MlaMergeParams::out_token_stride",
    ][::core::mem::offset_of!(MlaMergeParams, out_token_stride) - 32usize];
    [
        "Offset of field: MlaMergeParams::out_head_stride",
    ][::core::mem::offset_of!(MlaMergeParams, out_head_stride) - 40usize];
    [
        "Offset of field: MlaMergeParams::other_token_stride",
    ][::core::mem::offset_of!(MlaMergeParams, other_token_stride) - 48usize];
    [
        "Offset of field: MlaMergeParams::other_head_stride",
    ][::core::mem::offset_of!(MlaMergeParams, other_head_stride) - 56usize];
    [
        "Offset of field: MlaMergeParams::lse_head_stride",
    ][::core::mem::offset_of!(MlaMergeParams, lse_head_stride) - 64usize];
    [
        "Offset of field: MlaMergeParams::other_lse_head_stride",
    ][::core::mem::offset_of!(MlaMergeParams, other_lse_head_stride) - 72usize];
    [
        "Offset of field: MlaMergeParams::tokens",
    ][::core::mem::offset_of!(MlaMergeParams, tokens) - 80usize];
    [
        "Offset of field: MlaMergeParams::heads",
    ][::core::mem::offset_of!(MlaMergeParams, heads) - 84usize];
    [
        "Offset of field: MlaMergeParams::width",
    ][::core::mem::offset_of!(MlaMergeParams, width) - 88usize];
    [
        "Offset of field: MlaMergeParams::dtype",
    ][::core::mem::offset_of!(MlaMergeParams, dtype) - 92usize];
};
impl Default for MlaMergeParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_merge"]
    pub fn mla_merge(
        params: *const MlaMergeParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaOutputsParams {
    pub out: *mut ::core::ffi::c_void,
    pub sinks: *const f32,
    pub lse: *const f32,
    pub gate: *const ::core::ffi::c_void,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub gate_token_stride: i64,
    pub gate_head_stride: i64,
    pub lse_head_stride: i64,
    pub tokens: i32,
    pub heads: i32,
    pub width: i32,
    pub gate_width: i32,
    pub dtype: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaOutputsParams"][::core::mem::size_of::<MlaOutputsParams>() - 96usize];
    [
        "Alignment of MlaOutputsParams",
    ][::core::mem::align_of::<MlaOutputsParams>() - 8usize];
    [
        "Offset of field: MlaOutputsParams::out",
    ][::core::mem::offset_of!(MlaOutputsParams, out) - 0usize];
    [
        "Offset of field: MlaOutputsParams::sinks",
    ][::core::mem::offset_of!(MlaOutputsParams, sinks) - 8usize];
    [
        "Offset of field: MlaOutputsParams::lse",
    ][::core::mem::offset_of!(MlaOutputsParams, lse) - 16usize];
    [
        "Offset of field: MlaOutputsParams::gate",
    ][::core::mem::offset_of!(MlaOutputsParams, gate) - 24usize];
    [
        "Offset of field: MlaOutputsParams::out_token_stride",
    ][::core::mem::offset_of!(MlaOutputsParams, out_token_stride) - 32usize];
    [
        "Offset of field: MlaOutputsParams::out_head_stride",
    ][::core::mem::offset_of!(MlaOutputsParams, out_head_stride) - 40usize];
    [
        "Offset of field: MlaOutputsParams::gate_token_stride",
    ][::core::mem::offset_of!(MlaOutputsParams, gate_token_stride) - 48usize];
    [
        "Offset of field: MlaOutputsParams::gate_head_stride",
    ][::core::mem::offset_of!(MlaOutputsParams, gate_head_stride) - 56usize];
    [
        "Offset of field: MlaOutputsParams::lse_head_stride",
    ][::core::mem::offset_of!(MlaOutputsParams, lse_head_stride) - 64usize];
    [
        "Offset of field: MlaOutputsParams::tokens",
    ][::core::mem::offset_of!(MlaOutputsParams, tokens) - 72usize];
    [
        "Offset of field: MlaOutputsParams::heads",
    ][::core::mem::offset_of!(MlaOutputsParams, heads) - 76usize];
    [
        "Offset of field: MlaOutputsParams::width",
    ][::core::mem::offset_of!(MlaOutputsParams, width) - 80usize];
    [
        "Offset of field: MlaOutputsParams::gate_width",
    ][::core::mem::offset_of!(MlaOutputsParams, gate_width) - 84usize];
    [
        "Offset of field: MlaOutputsParams::dtype",
    ][::core::mem::offset_of!(MlaOutputsParams, dtype) - 88usize];
};
impl Default for MlaOutputsParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_outputs"]
    pub fn mla_outputs(
        params: *const MlaOutputsParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaLseParams {
    pub from: *const f32,
    pub to: *mut f32,
    pub from_row_stride: i64,
    pub to_head_stride: i64,
    pub tokens: i32,
    pub heads: i32,
    pub heads_first: i32,
    pub unit: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaLseParams"][::core::mem::size_of::<MlaLseParams>() - 48usize];
    ["Alignment of MlaLseParams"][::core::mem::align_of::<MlaLseParams>() - 8usize];
    [
        "Offset of field: MlaLseParams::from",
    ][::core::mem::offset_of!(MlaLseParams, from) - 0usize];
    [
        "Offset of field: MlaLseParams::to",
    ][::core::mem::offset_of!(MlaLseParams, to) - 8usize];
    [
        "Offset of field: MlaLseParams::from_row_stride",
    ][::core::mem::offset_of!(MlaLseParams, from_row_stride) - 16usize];
    [
        "Offset of field: MlaLseParams::to_head_stride",
    ][::core::mem::offset_of!(MlaLseParams, to_head_stride) - 24usize];
    [
        "Offset of field: MlaLseParams::tokens",
    ][::core::mem::offset_of!(MlaLseParams, tokens) - 32usize];
    [
        "Offset of field: MlaLseParams::heads",
    ][::core::mem::offset_of!(MlaLseParams, heads) - 36usize];
    [
        "Offset of field: MlaLseParams::heads_first",
    ][::core::mem::offset_of!(MlaLseParams, heads_first) - 40usize];
    [
        "Offset of field: MlaLseParams::unit",
    ][::core::mem::offset_of!(MlaLseParams, unit) - 44usize];
};
impl Default for MlaLseParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_lse_natural"]
    pub fn mla_lse_natural(
        params: *const MlaLseParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaCopyParams {
    pub from: *const ::core::ffi::c_void,
    pub to: *mut ::core::ffi::c_void,
    pub shape: [i64; 3usize],
    pub from_strides: [i64; 3usize],
    pub to_strides: [i64; 3usize],
    pub element_bytes: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaCopyParams"][::core::mem::size_of::<MlaCopyParams>() - 96usize];
    ["Alignment of MlaCopyParams"][::core::mem::align_of::<MlaCopyParams>() - 8usize];
    [
        "Offset of field: MlaCopyParams::from",
    ][::core::mem::offset_of!(MlaCopyParams, from) - 0usize];
    [
        "Offset of field: MlaCopyParams::to",
    ][::core::mem::offset_of!(MlaCopyParams, to) - 8usize];
    [
        "Offset of field: MlaCopyParams::shape",
    ][::core::mem::offset_of!(MlaCopyParams, shape) - 16usize];
    [
        "Offset of field: MlaCopyParams::from_strides",
    ][::core::mem::offset_of!(MlaCopyParams, from_strides) - 40usize];
    [
        "Offset of field: MlaCopyParams::to_strides",
    ][::core::mem::offset_of!(MlaCopyParams, to_strides) - 64usize];
    [
        "Offset of field: MlaCopyParams::element_bytes",
    ][::core::mem::offset_of!(MlaCopyParams, element_bytes) - 88usize];
};
impl Default for MlaCopyParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_copy"]
    pub fn mla_copy(
        params: *const MlaCopyParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaCopyRowsParams {
    pub from: *const ::core::ffi::c_void,
    pub places: *const i64,
    pub to: *mut ::core::ffi::c_void,
    pub rows: i64,
    pub to_rows: i64,
    pub heads: i64,
    pub width: i64,
    pub from_strides: [i64; 3usize],
    pub to_strides: [i64; 3usize],
    pub element_bytes: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaCopyRowsParams",
    ][::core::mem::size_of::<MlaCopyRowsParams>() - 112usize];
    [
        "Alignment of MlaCopyRowsParams",
    ][::core::mem::align_of::<MlaCopyRowsParams>() - 8usize];
    [
        "Offset of field: MlaCopyRowsParams::from",
    ][::core::mem::offset_of!(MlaCopyRowsParams, from) - 0usize];
    [
        "Offset of field: MlaCopyRowsParams::places",
    ][::core::mem::offset_of!(MlaCopyRowsParams, places) - 8usize];
    [
        "Offset of field: MlaCopyRowsParams::to",
    ][::core::mem::offset_of!(MlaCopyRowsParams, to) - 16usize];
    [
        "Offset of field: MlaCopyRowsParams::rows",
    ][::core::mem::offset_of!(MlaCopyRowsParams, rows) - 24usize];
    [
        "Offset of field: MlaCopyRowsParams::to_rows",
    ][::core::mem::offset_of!(MlaCopyRowsParams, to_rows) - 32usize];
    [
        "Offset of field: MlaCopyRowsParams::heads",
    ][::core::mem::offset_of!(MlaCopyRowsParams, heads) - 40usize];
    [
        "Offset of field: MlaCopyRowsParams::width",
    ][::core::mem::offset_of!(MlaCopyRowsParams, width) - 48usize];
    [
        "Offset of field: MlaCopyRowsParams::from_strides",
    ][::core::mem::offset_of!(MlaCopyRowsParams, from_strides) - 56usize];
    [
        "Offset of field: MlaCopyRowsParams::to_strides",
    ][::core::mem::offset_of!(MlaCopyRowsParams, to_strides) - 80usize];
    [
        "Offset of field: MlaCopyRowsParams::element_bytes",
    ][::core::mem::offset_of!(MlaCopyRowsParams, element_bytes) - 104usize];
};
impl Default for MlaCopyRowsParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_copy_rows"]
    pub fn mla_copy_rows(
        params: *const MlaCopyRowsParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaDequantizeParams {
    pub codes: *const ::core::ffi::c_void,
    pub scales: *const f32,
    pub out: *mut ::core::ffi::c_void,
    pub out_row_stride: i64,
    pub rows: i64,
    pub columns: i64,
    pub first_row: i32,
    pub dtype: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaDequantizeParams",
    ][::core::mem::size_of::<MlaDequantizeParams>() - 56usize];
    [
        "Alignment of MlaDequantizeParams",
    ][::core::mem::align_of::<MlaDequantizeParams>() - 8usize];
    [
        "Offset of field: MlaDequantizeParams::codes",
    ][::core::mem::offset_of!(MlaDequantizeParams, codes) - 0usize];
    [
        "Offset of field: MlaDequantizeParams::scales",
    ][::core::mem::offset_of!(MlaDequantizeParams, scales) - 8usize];
    [
        "Offset of field: MlaDequantizeParams::out",
    ][::core::mem::offset_of!(MlaDequantizeParams, out) - 16usize];
    [
        "Offset of field: MlaDequantizeParams::out_row_stride",
    ][::core::mem::offset_of!(MlaDequantizeParams, out_row_stride) - 24usize];
    [
        "Offset of field: MlaDequantizeParams::rows",
    ][::core::mem::offset_of!(MlaDequantizeParams, rows) - 32usize];
    [
        "Offset of field: MlaDequantizeParams::columns",
    ][::core::mem::offset_of!(MlaDequantizeParams, columns) - 40usize];
    [
        "Offset of field: MlaDequantizeParams::first_row",
    ][::core::mem::offset_of!(MlaDequantizeParams, first_row) - 48usize];
    [
        "Offset of field: MlaDequantizeParams::dtype",
    ][::core::mem::offset_of!(MlaDequantizeParams, dtype) - 52usize];
};
impl Default for MlaDequantizeParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_dequantize"]
    pub fn mla_dequantize(
        params: *const MlaDequantizeParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaHeadGemmParams {
    pub input: *const ::core::ffi::c_void,
    pub weights: *const ::core::ffi::c_void,
    pub out: *mut ::core::ffi::c_void,
    pub input_token_stride: i64,
    pub input_head_stride: i64,
    pub weights_head_stride: i64,
    pub weights_k_stride: i64,
    pub weights_n_stride: i64,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    pub tokens: i32,
    pub heads: i32,
    pub k: i32,
    pub n: i32,
    pub dtype: i32,
    pub constant_weights: i32,
    pub ready: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaHeadGemmParams",
    ][::core::mem::size_of::<MlaHeadGemmParams>() - 112usize];
    [
        "Alignment of MlaHeadGemmParams",
    ][::core::mem::align_of::<MlaHeadGemmParams>() - 8usize];
    [
        "Offset of field: MlaHeadGemmParams::input",
    ][::core::mem::offset_of!(MlaHeadGemmParams, input) - 0usize];
    [
        "Offset of field: MlaHeadGemmParams::weights",
    ][::core::mem::offset_of!(MlaHeadGemmParams, weights) - 8usize];
    [
        "Offset of field: MlaHeadGemmParams::out",
    ][::core::mem::offset_of!(MlaHeadGemmParams, out) - 16usize];
    [
        "Offset of field: MlaHeadGemmParams::input_token_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, input_token_stride) - 24usize];
    [
        "Offset of field: MlaHeadGemmParams::input_head_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, input_head_stride) - 32usize];
    [
        "Offset of field: MlaHeadGemmParams::weights_head_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, weights_head_stride) - 40usize];
    [
        "Offset of field: MlaHeadGemmParams::weights_k_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, weights_k_stride) - 48usize];
    [
        "Offset of field: MlaHeadGemmParams::weights_n_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, weights_n_stride) - 56usize];
    [
        "Offset of field: MlaHeadGemmParams::out_token_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, out_token_stride) - 64usize];
    [
        "Offset of field: MlaHeadGemmParams::out_head_stride",
    ][::core::mem::offset_of!(MlaHeadGemmParams, out_head_stride) - 72usize];
    [
        "Offset of field: MlaHeadGemmParams::tokens",
    ][::core::mem::offset_of!(MlaHeadGemmParams, tokens) - 80usize];
    [
        "Offset of field: MlaHeadGemmParams::heads",
    ][::core::mem::offset_of!(MlaHeadGemmParams, heads) - 84usize];
    [
        "Offset of field: MlaHeadGemmParams::k",
    ][::core::mem::offset_of!(MlaHeadGemmParams, k) - 88usize];
    [
        "Offset of field: MlaHeadGemmParams::n",
    ][::core::mem::offset_of!(MlaHeadGemmParams, n) - 92usize];
    [
        "Offset of field: MlaHeadGemmParams::dtype",
    ][::core::mem::offset_of!(MlaHeadGemmParams, dtype) - 96usize];
    [
        "Offset of field: MlaHeadGemmParams::constant_weights",
    ][::core::mem::offset_of!(MlaHeadGemmParams, constant_weights) - 100usize];
    [
        "Offset of field: MlaHeadGemmParams::ready",
    ][::core::mem::offset_of!(MlaHeadGemmParams, ready) - 104usize];
};
impl Default for MlaHeadGemmParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_head_gemm"]
    pub fn mla_head_gemm(
        params: *const MlaHeadGemmParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_absorb"]
    pub fn mla_absorb(
        write: *const MlaCacheWriteParams,
        product: *const MlaHeadGemmParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_fence"]
    pub fn mla_fence(stream: *mut ::core::ffi::c_void) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_load_helpers"]
    pub fn mla_load_helpers() -> MlaStatus;
}
