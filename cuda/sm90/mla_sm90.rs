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
