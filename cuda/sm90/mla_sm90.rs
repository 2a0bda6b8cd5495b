// cuda/sm90/mla_sm90.h
pub const MLA_DECODE_COUNTER_BYTES: u32 = 4096;
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_decode_sm90_workspace"]
    pub fn mla_decode_sm90_workspace(
        params: *const MlaDecodeParams,
        bytes: *mut usize,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_decode_sm90"]
    pub fn mla_decode_sm90(
        params: *const MlaDecodeParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_sparse_sm90"]
    pub fn mla_sparse_sm90(
        params: *const MlaSparseParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaIndexRotary {
    pub positions: *const i64,
    pub cos: *const f32,
    pub sin: *const f32,
    pub table_stride: i64,
    pub positions_len: i64,
    pub style: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaIndexRotary"][::core::mem::size_of::<MlaIndexRotary>() - 48usize];
    ["Alignment of MlaIndexRotary"][::core::mem::align_of::<MlaIndexRotary>() - 8usize];
    [
        "Offset of field: MlaIndexRotary::positions",
    ][::core::mem::offset_of!(MlaIndexRotary, positions) - 0usize];
    [
        "Offset of field: MlaIndexRotary::cos",
    ][::core::mem::offset_of!(MlaIndexRotary, cos) - 8usize];
    [
        "Offset of field: MlaIndexRotary::sin",
    ][::core::mem::offset_of!(MlaIndexRotary, sin) - 16usize];
    [
        "Offset of field: MlaIndexRotary::table_stride",
    ][::core::mem::offset_of!(MlaIndexRotary, table_stride) - 24usize];
    [
        "Offset of field: MlaIndexRotary::positions_len",
    ][::core::mem::offset_of!(MlaIndexRotary, positions_len) - 32usize];
    [
        "Offset of field: MlaIndexRotary::style",
    ][::core::mem::offset_of!(MlaIndexRotary, style) - 40usize];
};
impl Default for MlaIndexRotary {
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
pub struct MlaIndexKeysParams {
    pub keys: *const ::core::ffi::c_void,
    pub norm_weight: *const ::core::ffi::c_void,
    pub norm_bias: *const ::core::ffi::c_void,
    pub slots: *const i64,
    pub cache: *mut ::core::ffi::c_void,
    pub rotary: MlaIndexRotary,
    pub key_stride: i64,
    pub page_stride: i64,
    pub pages: i64,
    pub tokens: i32,
    pub page_size: i32,
    pub width: i32,
    pub keys_dtype: i32,
    pub norm_weight_dtype: i32,
    pub norm_bias_dtype: i32,
    pub hadamard: i32,
    pub epsilon: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaIndexKeysParams",
    ][::core::mem::size_of::<MlaIndexKeysParams>() - 144usize];
    [
        "Alignment of MlaIndexKeysParams",
    ][::core::mem::align_of::<MlaIndexKeysParams>() - 8usize];
    [
        "Offset of field: MlaIndexKeysParams::keys",
    ][::core::mem::offset_of!(MlaIndexKeysParams, keys) - 0usize];
    [
        "Offset of field: MlaIndexKeysParams::norm_weight",
    ][::core::mem::offset_of!(MlaIndexKeysParams, norm_weight) - 8usize];
    [
        "Offset of field: MlaIndexKeysParams::norm_bias",
    ][::core::mem::offset_of!(MlaIndexKeysParams, norm_bias) - 16usize];
    [
        "Offset of field: MlaIndexKeysParams::slots",
    ][::core::mem::offset_of!(MlaIndexKeysParams, slots) - 24usize];
    [
        "Offset of field: MlaIndexKeysParams::cache",
    ][::core::mem::offset_of!(MlaIndexKeysParams, cache) - 32usize];
    [
        "Offset of field: MlaIndexKeysParams::rotary",
    ][::core::mem::offset_of!(MlaIndexKeysParams, rotary) - 40usize];
    [
        "Offset of field: MlaIndexKeysParams::key_stride",
    ][::core::mem::offset_of!(MlaIndexKeysParams, key_stride) - 88usize];
    [
        "Offset of field: MlaIndexKeysParams::page_stride",
    ][::core::mem::offset_of!(MlaIndexKeysParams, page_stride) - 96usize];
    [
        "Offset of field: MlaIndexKeysParams::pages",
    ][::core::mem::offset_of!(MlaIndexKeysParams, pages) - 104usize];
    [
        "Offset of field: MlaIndexKeysParams::tokens",
    ][::core::mem::offset_of!(MlaIndexKeysParams, tokens) - 112usize];
    [
        "Offset of field: MlaIndexKeysParams::page_size",
    ][::core::mem::offset_of!(MlaIndexKeysParams, page_size) - 116usize];
    [
        "Offset of field: MlaIndexKeysParams::width",
    ][::core::mem::offset_of!(MlaIndexKeysParams, width) - 120usize];
    [
        "Offset of field: MlaIndexKeysParams::keys_dtype",
    ][::core::mem::offset_of!(MlaIndexKeysParams, keys_dtype) - 124usize];
    [
        "Offset of field: MlaIndexKeysParams::norm_weight_dtype",
    ][::core::mem::offset_of!(MlaIndexKeysParams, norm_weight_dtype) - 128usize];
    [
        "Offset of field: MlaIndexKeysParams::norm_bias_dtype",
    ][::core::mem::offset_of!(MlaIndexKeysParams, norm_bias_dtype) - 132usize];
    [
        "Offset of field: MlaIndexKeysParams::hadamard",
    ][::core::mem::offset_of!(MlaIndexKeysParams, hadamard) - 136usize];
    [
        "Offset of field: MlaIndexKeysParams::epsilon",
    ][::core::mem::offset_of!(MlaIndexKeysParams, epsilon) - 140usize];
};
impl Default for MlaIndexKeysParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_index_keys_sm90"]
    pub fn mla_index_keys_sm90(
        params: *const MlaIndexKeysParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaIndexQueriesParams {
    pub queries: *const ::core::ffi::c_void,
    pub head_weights: *const ::core::ffi::c_void,
    pub values: *mut ::core::ffi::c_void,
    pub weights: *mut f32,
    pub rotary: MlaIndexRotary,
    pub query_token_stride: i64,
    pub query_head_stride: i64,
    pub head_weight_stride: i64,
    pub tokens: i32,
    pub heads: i32,
    pub width: i32,
    pub queries_dtype: i32,
    pub head_weights_dtype: i32,
    pub hadamard: i32,
    pub weight_scale: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaIndexQueriesParams",
    ][::core::mem::size_of::<MlaIndexQueriesParams>() - 136usize];
    [
        "Alignment of MlaIndexQueriesParams",
    ][::core::mem::align_of::<MlaIndexQueriesParams>() - 8usize];
    [
        "Offset of field: MlaIndexQueriesParams::queries",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, queries) - 0usize];
    [
        "Offset of field: MlaIndexQueriesParams::head_weights",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, head_weights) - 8usize];
    [
        "Offset of field: MlaIndexQueriesParams::values",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, values) - 16usize];
    [
        "Offset of field: MlaIndexQueriesParams::weights",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, weights) - 24usize];
    [
        "Offset of field: MlaIndexQueriesParams::rotary",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, rotary) - 32usize];
    [
        "Offset of field: MlaIndexQueriesParams::query_token_stride",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, query_token_stride) - 80usize];
    [
        "Offset of field: MlaIndexQueriesParams::query_head_stride",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, query_head_stride) - 88usize];
    [
        "Offset of field: MlaIndexQueriesParams::head_weight_stride",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, head_weight_stride) - 96usize];
    [
        "Offset of field: MlaIndexQueriesParams::tokens",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, tokens) - 104usize];
    [
        "Offset of field: MlaIndexQueriesParams::heads",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, heads) - 108usize];
    [
        "Offset of field: MlaIndexQueriesParams::width",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, width) - 112usize];
    [
        "Offset of field: MlaIndexQueriesParams::queries_dtype",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, queries_dtype) - 116usize];
    [
        "Offset of field: MlaIndexQueriesParams::head_weights_dtype",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, head_weights_dtype) - 120usize];
    [
        "Offset of field: MlaIndexQueriesParams::hadamard",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, hadamard) - 124usize];
    [
        "Offset of field: MlaIndexQueriesParams::weight_scale",
    ][::core::mem::offset_of!(MlaIndexQueriesParams, weight_scale) - 128usize];
};
impl Default for MlaIndexQueriesParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_index_queries_sm90"]
    pub fn mla_index_queries_sm90(
        params: *const MlaIndexQueriesParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaIndexLogitsParams {
    pub queries: *const ::core::ffi::c_void,
    pub weights: *const f32,
    pub cache: *const ::core::ffi::c_void,
    pub query_starts: *const i32,
    pub seq_lens: *const i32,
    pub block_table: *const i32,
    pub logits: *mut f32,
    pub page_stride: i64,
    pub block_table_stride: i64,
    pub logits_stride: i64,
    pub pages: i64,
    pub rows: i32,
    pub first_token: i32,
    pub requests: i32,
    pub columns: i32,
    pub max_pages: i32,
    pub page_size: i32,
    pub heads: i32,
    pub width: i32,
    pub after_queries: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaIndexLogitsParams",
    ][::core::mem::size_of::<MlaIndexLogitsParams>() - 128usize];
    [
        "Alignment of MlaIndexLogitsParams",
    ][::core::mem::align_of::<MlaIndexLogitsParams>() - 8usize];
    [
        "Offset of field: MlaIndexLogitsParams::queries",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, queries) - 0usize];
    [
        "Offset of field: MlaIndexLogitsParams::weights",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, weights) - 8usize];
    [
        "Offset of field: MlaIndexLogitsParams::cache",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, cache) - 16usize];
    [
        "Offset of field: MlaIndexLogitsParams::query_starts",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, query_starts) - 24usize];
    [
        "Offset of field: MlaIndexLogitsParams::seq_lens",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, seq_lens) - 32usize];
    [
        "Offset of field: MlaIndexLogitsParams::block_table",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, block_table) - 40usize];
    [
        "Offset of field: MlaIndexLogitsParams::logits",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, logits) - 48usize];
    [
        "Offset of field: MlaIndexLogitsParams::page_stride",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, page_stride) - 56usize];
    [
        "Offset of field: MlaIndexLogitsParams::block_table_stride",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, block_table_stride) - 64usize];
    [
        "Offset of field: MlaIndexLogitsParams::logits_stride",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, logits_stride) - 72usize];
    [
        "Offset of field: MlaIndexLogitsParams::pages",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, pages) - 80usize];
    [
        "Offset of field: MlaIndexLogitsParams::rows",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, rows) - 88usize];
    [
        "Offset of field: MlaIndexLogitsParams::first_token",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, first_token) - 92usize];
    [
        "Offset of field: MlaIndexLogitsParams::requests",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, requests) - 96usize];
    [
        "Offset of field: MlaIndexLogitsParams::columns",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, columns) - 100usize];
    [
        "Offset of field: MlaIndexLogitsParams::max_pages",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, max_pages) - 104usize];
    [
        "Offset of field: MlaIndexLogitsParams::page_size",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, page_size) - 108usize];
    [
        "Offset of field: MlaIndexLogitsParams::heads",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, heads) - 112usize];
    [
        "Offset of field: MlaIndexLogitsParams::width",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, width) - 116usize];
    [
        "Offset of field: MlaIndexLogitsParams::after_queries",
    ][::core::mem::offset_of!(MlaIndexLogitsParams, after_queries) - 120usize];
};
impl Default for MlaIndexLogitsParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_index_logits_sm90"]
    pub fn mla_index_logits_sm90(
        params: *const MlaIndexLogitsParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct MlaTopkParams {
    pub logits: *const f32,
    pub query_starts: *const i32,
    pub seq_lens: *const i32,
    pub block_table: *const i32,
    pub lists: *mut i32,
    pub logits_stride: i64,
    pub block_table_stride: i64,
    pub list_stride: i64,
    pub pages: i64,
    pub rows: i32,
    pub first_token: i32,
    pub requests: i32,
    pub columns: i32,
    pub topk: i32,
    pub max_pages: i32,
    pub page_size: i32,
    pub after_logits: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaTopkParams"][::core::mem::size_of::<MlaTopkParams>() - 104usize];
    ["Alignment of MlaTopkParams"][::core::mem::align_of::<MlaTopkParams>() - 8usize];
    [
        "Offset of field: MlaTopkParams::logits",
    ][::core::mem::offset_of!(MlaTopkParams, logits) - 0usize];
    [
        "Offset of field: MlaTopkParams::query_starts",
    ][::core::mem::offset_of!(MlaTopkParams, query_starts) - 8usize];
    [
        "Offset of field: MlaTopkParams::seq_lens",
    ][::core::mem::offset_of!(MlaTopkParams, seq_lens) - 16usize];
    [
        "Offset of field: MlaTopkParams::block_table",
    ][::core::mem::offset_of!(MlaTopkParams, block_table) - 24usize];
    [
        "Offset of field: MlaTopkParams::lists",
    ][::core::mem::offset_of!(MlaTopkParams, lists) - 32usize];
    [
        "Offset of field: MlaTopkParams::logits_stride",
    ][::core::mem::offset_of!(MlaTopkParams, logits_stride) - 40usize];
    [
        "Offset of field: MlaTopkParams::block_table_stride",
    ][::core::mem::offset_of!(MlaTopkParams, block_table_stride) - 48usize];
    [
        "Offset of field: MlaTopkParams::list_stride",
    ][::core::mem::offset_of!(MlaTopkParams, list_stride) - 56usize];
    [
        "Offset of field: MlaTopkParams::pages",
    ][::core::mem::offset_of!(MlaTopkParams, pages) - 64usize];
    [
        "Offset of field: MlaTopkParams::rows",
    ][::core::mem::offset_of!(MlaTopkParams, rows) - 72usize];
    [
        "Offset of field: MlaTopkParams::first_token",
    ][::core::mem::offset_of!(MlaTopkParams, first_token) - 76usize];
    [
        "Offset of field: MlaTopkParams::requests",
    ][::core::mem::offset_of!(MlaTopkParams, requests) - 80usize];
    [
        "Offset of field: MlaTopkParams::columns",
    ][::core::mem::offset_of!(MlaTopkParams, columns) - 84usize];
    [
        "Offset of field: MlaTopkParams::topk",
    ][::core::mem::offset_of!(MlaTopkParams, topk) - 88usize];
    [
        "Offset of field: MlaTopkParams::max_pages",
    ][::core::mem::offset_of!(MlaTopkParams, max_pages) - 92usize];
    [
        "Offset of field: MlaTopkParams::page_size",
    ][::core::mem::offset_of!(MlaTopkParams, page_size) - 96usize];
    [
        "Offset of field: MlaTopkParams::after_logits",
    ][::core::mem::offset_of!(MlaTopkParams, after_logits) - 100usize];
};
impl Default for MlaTopkParams {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_topk_sm90"]
    pub fn mla_topk_sm90(
        params: *const MlaTopkParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_index_write_sm90"]
    pub fn mla_index_write_sm90(
        rows: *const MlaCacheWriteParams,
        keys: *const MlaIndexKeysParams,
        queries: *const MlaIndexQueriesParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_prefill_sm90_workspace"]
    pub fn mla_prefill_sm90_workspace(
        params: *const MlaPrefillParams,
        bytes: *mut usize,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_prefill_sm90"]
    pub fn mla_prefill_sm90(
        params: *const MlaPrefillParams,
        stream: *mut ::core::ffi::c_void,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_load_prefill_sm90"]
    pub fn mla_load_prefill_sm90(params: *const MlaPrefillParams) -> MlaStatus;
}
