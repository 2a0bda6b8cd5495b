// Values in the words of other libraries: the hint is what is meant.

use mla_runtime::backend::{DecodeBackend};
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct GraphsTrue;

#[mla_backend(sm = "90", dtypes = "bf16", graphs = true)]
impl DecodeBackend for GraphsTrue {
    decode_body!(common::Bytes);
}

struct GraphsFalse;

#[mla_backend(sm = "90", dtypes = "bf16", graphs = false)]
impl DecodeBackend for GraphsFalse {
    decode_body!(common::Bytes);
}

struct GraphsFull;

#[mla_backend(sm = "90", dtypes = "bf16", graphs = "full")]
impl DecodeBackend for GraphsFull {
    decode_body!(common::Bytes);
}

struct LseFalse;

#[mla_backend(sm = "90", dtypes = "bf16", lse = false)]
impl DecodeBackend for LseFalse {
    decode_body!(common::Bytes);
}

struct SparseTrue;

#[mla_backend(sm = "90", dtypes = "bf16", sparse = true)]
impl DecodeBackend for SparseTrue {
    decode_body!(common::Bytes);
}

struct QueryLenOne;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = 1)]
impl DecodeBackend for QueryLenOne {
    decode_body!(common::Bytes);
}

struct QueryLenFour;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = "4")]
impl DecodeBackend for QueryLenFour {
    decode_body!(common::Bytes);
}

struct MaxQueryLenNone;

#[mla_backend(sm = "90", dtypes = "bf16", max_query_len = None)]
impl DecodeBackend for MaxQueryLenNone {
    decode_body!(common::Bytes);
}

struct KvAuto;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "auto")]
impl DecodeBackend for KvAuto {
    decode_body!(common::Bytes);
}

struct KvE5m2;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "fp8_e5m2")]
impl DecodeBackend for KvE5m2 {
    decode_body!(common::Bytes);
}

struct KvE4m3;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "e4m3")]
impl DecodeBackend for KvE4m3 {
    decode_body!(common::Bytes);
}

struct DtypesFp8;

#[mla_backend(sm = "90", dtypes = "fp8")]
impl DecodeBackend for DtypesFp8 {
    decode_body!(common::Bytes);
}

struct DtypesE4m3;

#[mla_backend(sm = "90", dtypes = "bf16,e4m3")]
impl DecodeBackend for DtypesE4m3 {
    decode_body!(common::Bytes);
}

struct DtypesAny;

#[mla_backend(sm = "90", dtypes = "any")]
impl DecodeBackend for DtypesAny {
    decode_body!(common::Bytes);
}

struct DimsOfAModel;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "deepseek-r1", cache_dims = "DeepSeek-V3")]
impl DecodeBackend for DimsOfAModel {
    decode_body!(common::Bytes);
}

struct DimsInBrackets;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "[128, 64, 128]", cache_dims = "512x64")]
impl DecodeBackend for DimsInBrackets {
    decode_body!(common::Bytes);
}

struct HeadsDash;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "1-128")]
impl DecodeBackend for HeadsDash {
    decode_body!(common::Bytes);
}

struct HeadsUpTo;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "..=128")]
impl DecodeBackend for HeadsUpTo {
    decode_body!(common::Bytes);
}

struct HeadsLess;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "<=128")]
impl DecodeBackend for HeadsLess {
    decode_body!(common::Bytes);
}

struct HeadsFrom;

#[mla_backend(sm = "90", dtypes = "bf16", heads = ">=16")]
impl DecodeBackend for HeadsFrom {
    decode_body!(common::Bytes);
}

struct HeadsListedRange;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "8|16-32")]
impl DecodeBackend for HeadsListedRange {
    decode_body!(common::Bytes);
}

struct HeadsMultiple;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "16x")]
impl DecodeBackend for HeadsMultiple {
    decode_body!(common::Bytes);
}

struct HeadsBeyond;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "65537")]
impl DecodeBackend for HeadsBeyond {
    decode_body!(common::Bytes);
}

struct PagesBehind;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "16x")]
impl DecodeBackend for PagesBehind {
    decode_body!(common::Bytes);
}

struct PagesRange;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "16..=64")]
impl DecodeBackend for PagesRange {
    decode_body!(common::Bytes);
}

struct PagesSpelled;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "1_024")]
impl DecodeBackend for PagesSpelled {
    decode_body!(common::Bytes);
}

struct AlignmentBytes;

#[mla_backend(sm = "90", dtypes = "bf16", alignment = "16B")]
impl DecodeBackend for AlignmentBytes {
    decode_body!(common::Bytes);
}

struct FeaturesNoneAndMore;

#[mla_backend(sm = "90", dtypes = "bf16", features = "none,sinks")]
impl DecodeBackend for FeaturesNoneAndMore {
    decode_body!(common::Bytes);
}

struct FeaturesCausal;

#[mla_backend(sm = "90", dtypes = "bf16", features = "causal")]
impl DecodeBackend for FeaturesCausal {
    decode_body!(common::Bytes);
}

struct FlagNumber;

#[mla_backend(sm = "90", dtypes = "bf16", quant_output = 0)]
impl DecodeBackend for FlagNumber {
    decode_body!(common::Bytes);
}

struct FlagWord;

#[mla_backend(sm = "90", dtypes = "bf16", plans_on_host = "yes")]
impl DecodeBackend for FlagWord {
    decode_body!(common::Bytes);
}

struct SmSemicolon;

#[mla_backend(dtypes = "bf16", sm = "90;100")]
impl DecodeBackend for SmSemicolon {
    decode_body!(common::Bytes);
}

struct SmAndLater;

#[mla_backend(dtypes = "bf16", sm = "sm_80+")]
impl DecodeBackend for SmAndLater {
    decode_body!(common::Bytes);
}

struct SmPath;

#[mla_backend(dtypes = "bf16", sm = hopper)]
impl DecodeBackend for SmPath {
    decode_body!(common::Bytes);
}

struct SmPaths;

#[mla_backend(dtypes = "bf16", sm = [sm_90a, sm_100a])]
impl DecodeBackend for SmPaths {
    decode_body!(common::Bytes);
}

struct PrioritySpaces;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "90:1 *:0")]
impl DecodeBackend for PrioritySpaces {
    decode_body!(common::Bytes);
}

fn main() {}
