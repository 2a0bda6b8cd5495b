// cuda/sm90/mla_sm90_division.h
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct MlaDecodeWorkItem {
    pub request: i32,
    pub first_row: i32,
    pub rows: i32,
    pub kv_tile_begin: i32,
    pub kv_tile_end: i32,
    pub split: i32,
    pub splits: i32,
    pub first_group: i32,
    pub combiners: i32,
    pub last: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaDecodeWorkItem"][::core::mem::size_of::<MlaDecodeWorkItem>() - 40usize];
    [
        "Alignment of MlaDecodeWorkItem",
    ][::core::mem::align_of::<MlaDecodeWorkItem>() - 4usize];
};
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_decode_sm90_work_items"]
    pub fn mla_decode_sm90_work_items(
        params: *const MlaDecodeParams,
        groups: i32,
        group: i32,
        items: *mut MlaDecodeWorkItem,
        room: i32,
        count: *mut i32,
    ) -> MlaStatus;
}
pub const MLA_SPLIT_NONE: MlaSplitRole = 0;
pub const MLA_SPLIT_SLICE: MlaSplitRole = 1;
pub const MLA_SPLIT_YIELD: MlaSplitRole = 2;
pub const MLA_SPLIT_EVERYTHING: MlaSplitRole = 3;
pub type MlaSplitRole = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct MlaSplitCounters {
    pub arrived: i32,
    pub left: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of MlaSplitCounters"][::core::mem::size_of::<MlaSplitCounters>() - 8usize];
    [
        "Alignment of MlaSplitCounters",
    ][::core::mem::align_of::<MlaSplitCounters>() - 4usize];
};
pub const MLA_SPLIT_ARRIVE: MlaSplitStep = 0;
pub const MLA_SPLIT_ARRIVE_COMBINER: MlaSplitStep = 1;
pub const MLA_SPLIT_LOOK: MlaSplitStep = 2;
pub const MLA_SPLIT_ROLE_OF: MlaSplitStep = 3;
pub const MLA_SPLIT_FALL_BACK: MlaSplitStep = 4;
pub const MLA_SPLIT_YIELDED: MlaSplitStep = 5;
pub const MLA_SPLIT_LEAVE: MlaSplitStep = 6;
pub const MLA_SPLIT_RESET: MlaSplitStep = 7;
pub type MlaSplitStep = ::core::ffi::c_uint;
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_split_step"]
    pub fn mla_split_step(
        step: i32,
        counters: *mut MlaSplitCounters,
        splits: i32,
        combiners: i32,
        seen: i32,
        answer: *mut i32,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_sparse_sm90_splits"]
    pub fn mla_sparse_sm90_splits(
        params: *const MlaSparseParams,
        clusters: *const i32,
        splits: *mut i32,
        tile_heads: *mut i32,
    ) -> MlaStatus;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct MlaPrefillWorkItem {
    pub request: i32,
    pub head: i32,
    pub query: i32,
    pub begin: i32,
    pub end: i32,
    pub split: i32,
    pub splits: i32,
    pub slot: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of MlaPrefillWorkItem",
    ][::core::mem::size_of::<MlaPrefillWorkItem>() - 32usize];
    [
        "Alignment of MlaPrefillWorkItem",
    ][::core::mem::align_of::<MlaPrefillWorkItem>() - 4usize];
};
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_prefill_sm90_work_items"]
    pub fn mla_prefill_sm90_work_items(
        params: *const MlaPrefillParams,
        ctas: i32,
        items: *mut MlaPrefillWorkItem,
        room: i32,
        count: *mut i32,
    ) -> MlaStatus;
}
unsafe extern "C" {
    #[link_name = "\u{1}mla_kernels_0_1_0_mla__mla_prefill_sm90_unsplit_work_items"]
    pub fn mla_prefill_sm90_unsplit_work_items(
        params: *const MlaPrefillParams,
        ctas: i32,
        swizzle_requests: i32,
        swizzle_heads: i32,
        items: *mut MlaPrefillWorkItem,
        room: i32,
        count: *mut i32,
    ) -> MlaStatus;
}
