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
    pub batch_invariant: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaDecodeParams"][::core::mem::size_of::<MlaDecodeParams>() - 256usize];
    [
        "Alignment of MlaDecodeParams",
    ][::core::mem::align_of::<MlaDecodeParams>() - 8usize];
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
    pub batch_invariant: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaPrefillParams"][::core::mem::size_of::<MlaPrefillParams>() - 224usize];
    [
        "Alignment of MlaPrefillParams",
    ][::core::mem::align_of::<MlaPrefillParams>() - 8usize];
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
