// Keys that contradict each other or the phase.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

decode_backend!(KvWithoutDtype: sm = "90", dtypes = "bf16", kv = "bf16,f16");
decode_backend!(DtypeWithoutKv: sm = "90", dtypes = "f16,bf16", kv = "bf16");
decode_backend!(PartialGroup: sm = "90", dtypes = "bf16", kv = "fp8_ds_mla", cache_dims = "(448,64)");
decode_backend!(GraphsBeyondSingle: sm = "90", dtypes = "bf16", graphs = "uniform_batch");
decode_backend!(GraphsBeyondUniform: sm = "90", dtypes = "bf16", query_len = "uniform", graphs = "always");
decode_backend!(RowWithoutHead: sm = "90", dtypes = "bf16", dims = "(128,64,128)", cache_dims = "(512,64)|(256,32)");
prefill_backend!(PrefillWithoutLse: sm = "90", dtypes = "bf16", lse = "none");
prefill_backend!(PrefillCache: sm = "90", dtypes = "bf16", kv = "bf16");
prefill_backend!(PrefillPages: sm = "90", dtypes = "bf16", page_sizes = 64);
prefill_backend!(PrefillQueryLen: sm = "90", dtypes = "bf16", query_len = "ragged");
prefill_backend!(PrefillSparse: sm = "90", dtypes = "bf16", sparse = "never");
prefill_backend!(PrefillRow: sm = "90", dtypes = "bf16", cache_dims = "any");
decode_backend!(WidthWithoutLists: sm = "90", dtypes = "bf16", max_list_width = 8192);
decode_backend!(SeveralOfSingle: sm = "90", dtypes = "bf16", max_query_len = 8);
decode_backend!(PrecisionOfNothing: sm = "90", dtypes = "bf16", lse = "none", lse_precision = "f32");
decode_backend!(FeaturesOfLists: sm = "90", dtypes = "bf16", features = "second_cache,sinks,dense_requests");
prefill_backend!(PrefillLists: sm = "90", dtypes = "bf16", features = "dense_requests");

decode_backend!(PriorityOnProcessors on common::Bytes<true>: sm = "any", dtypes = "bf16", priority = "90:10");

fn main() {}
