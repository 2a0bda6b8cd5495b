// Arguments with the names and the form of other libraries. The error says what to write.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

// Values with the names of other libraries. The hint says what was meant.

decode_backend!(GraphsTrue: sm = "90", dtypes = "bf16", graphs = true);
decode_backend!(GraphsFalse: sm = "90", dtypes = "bf16", graphs = false);
decode_backend!(GraphsFull: sm = "90", dtypes = "bf16", graphs = "full");
decode_backend!(LseFalse: sm = "90", dtypes = "bf16", lse = false);
decode_backend!(SparseTrue: sm = "90", dtypes = "bf16", sparse = true);
decode_backend!(QueryLenOne: sm = "90", dtypes = "bf16", query_len = 1);
decode_backend!(QueryLenFour: sm = "90", dtypes = "bf16", query_len = "4");
decode_backend!(MaxQueryLenNone: sm = "90", dtypes = "bf16", max_query_len = None);
decode_backend!(KvAuto: sm = "90", dtypes = "bf16", kv = "auto");
decode_backend!(KvE5m2: sm = "90", dtypes = "bf16", kv = "fp8_e5m2");
decode_backend!(KvE4m3: sm = "90", dtypes = "bf16", kv = "e4m3");
decode_backend!(DtypesFp8: sm = "90", dtypes = "fp8");
decode_backend!(DtypesE4m3: sm = "90", dtypes = "bf16,e4m3");
decode_backend!(DtypesAny: sm = "90", dtypes = "any");
decode_backend!(DimsOfAModel: sm = "90", dtypes = "bf16", dims = "deepseek-r1", cache_dims = "DeepSeek-V3");
decode_backend!(DimsInBrackets: sm = "90", dtypes = "bf16", dims = "[128, 64, 128]", cache_dims = "512x64");
decode_backend!(HeadsDash: sm = "90", dtypes = "bf16", heads = "1-128");
decode_backend!(HeadsUpTo: sm = "90", dtypes = "bf16", heads = "..=128");
decode_backend!(HeadsLess: sm = "90", dtypes = "bf16", heads = "<=128");
decode_backend!(HeadsFrom: sm = "90", dtypes = "bf16", heads = ">=16");
decode_backend!(HeadsListedRange: sm = "90", dtypes = "bf16", heads = "8|16-32");
decode_backend!(HeadsMultiple: sm = "90", dtypes = "bf16", heads = "16x");
decode_backend!(HeadsBeyond: sm = "90", dtypes = "bf16", heads = "65537");
decode_backend!(PagesBehind: sm = "90", dtypes = "bf16", page_sizes = "16x");
decode_backend!(PagesRange: sm = "90", dtypes = "bf16", page_sizes = "16..=64");
decode_backend!(PagesSpelled: sm = "90", dtypes = "bf16", page_sizes = "1_024");
decode_backend!(AlignmentBytes: sm = "90", dtypes = "bf16", alignment = "16B");
decode_backend!(FeaturesNoneAndMore: sm = "90", dtypes = "bf16", features = "none,sinks");
decode_backend!(FeaturesCausal: sm = "90", dtypes = "bf16", features = "causal");
decode_backend!(FlagNumber: sm = "90", dtypes = "bf16", quant_output = 0);
decode_backend!(FlagWord: sm = "90", dtypes = "bf16", plans_on_host = "yes");
decode_backend!(SmSemicolon: dtypes = "bf16", sm = "90;100");
decode_backend!(SmAndLater: dtypes = "bf16", sm = "sm_80+");
decode_backend!(SmPath: dtypes = "bf16", sm = hopper);
decode_backend!(SmPaths: dtypes = "bf16", sm = [sm_90a, sm_100a]);
decode_backend!(PrioritySpaces: sm = "90", dtypes = "bf16", priority = "90:1 *:0");

// Recommended values are accepted, and missing parts are named.

decode_backend!(Bracketed: sm = [90, 100], dtypes = (f16, bf16), kv = ["bf16", "fp8"]);
decode_backend!(Unquoted: sm = SM, dtypes = bf16, priority = 5 - 3, heads = 16.., page_sizes = 1.5);
decode_backend!(Capital: SM = "90", dtypes = "bf16");
decode_backend!(NoComma: sm = "90" dtypes = "bf16" heads = 16);
decode_backend!(NoParentheses: sm = "90", dtypes = "bf16", dims = "128,64,128", cache_dims = "512,64|256,64");
decode_backend!(ThreeOfTwo: sm = "90", dtypes = "bf16", cache_dims = "512,64,128");
decode_backend!(NotAlone: sm = "90", dtypes = "bf16", heads = "x16", page_sizes = "1..=3");
decode_backend!(Alone: sm = "90", dtypes = "bf16", heads = "1..=3|8", page_sizes = "x16|8");
decode_backend!(Ranges: sm = "90-100", dtypes = "bf16", heads = "16..");
decode_backend!(Names: sm = "hopper|B200", dtypes = "bf16", query_len = "varlen", lse = "natural", priority = "hopper:1");
prefill_backend!(Generation1: sm = "10|12+", dtypes = "bf16", requires_r1 = true);

struct Twice;

#[mla_backend(sm = "90", dtypes = "bf16")]
#[mla_backend(sm = "100", dtypes = "bf16")]
impl DecodeBackend for Twice {
    decode_body!(common::Bytes);
}

decode_backend!(Semicolons: sm = "90"; dtypes = "bf16");

fn main() {}
