// Arguments that are refused because of their form or their key.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

// The arguments as a whole: missing, unknown and repeated keys, and values of the wrong kind.

struct Nothing;

#[mla_backend()]
impl DecodeBackend for Nothing {
    decode_body!(common::Bytes);
}

struct NoSm;

#[mla_backend(dtypes = "bf16")]
impl DecodeBackend for NoSm {
    decode_body!(common::Bytes);
}

struct NoDtypes;

#[mla_backend(sm = "90")]
impl DecodeBackend for NoDtypes {
    decode_body!(common::Bytes);
}

decode_backend!(Unknown: sm = "90", dtype = "bf16");
decode_backend!(Foreign: arch = "90", dtypes = "bf16");
decode_backend!(Strange: sm = "90", dtypes = "bf16", colour = "red");
decode_backend!(Repeated: sm = "90", dtypes = "bf16", sm = "100");
decode_backend!(NoValue: sm = "90", dtypes = "bf16", requires_r1);
decode_backend!(NothingAfterEquals: sm = "90", dtypes = "bf16", quant_output =);
decode_backend!(Parenthesised: sm("90"), dtypes = "bf16");

struct Literal;

#[mla_backend("90", dtypes = "bf16")]
impl DecodeBackend for Literal {
    decode_body!(common::Bytes);
}

decode_backend!(TwoCommas: sm = "90",, dtypes = "bf16");

struct OnlyComma;

#[mla_backend(,)]
impl DecodeBackend for OnlyComma {
    decode_body!(common::Bytes);
}

decode_backend!(Colon: sm: "90", dtypes = "bf16");
decode_backend!(Suffix: sm = "90", dtypes = "bf16", heads = 16u32);
decode_backend!(SuffixString: sm = "90", dtypes = "bf16", name = "A"x);
decode_backend!(FlagInQuotes: sm = "90", dtypes = "bf16", requires_r1 = "true");
decode_backend!(FlagNumber: sm = "90", dtypes = "bf16", quant_output = 1);
decode_backend!(BadCrate: sm = "90", dtypes = "bf16", crate = "not a path");
decode_backend!(CrateNumber: sm = "90", dtypes = "bf16", crate = 3);

// Keys with the names of other libraries.

decode_backend!(NumHeads: sm = "90", dtypes = "bf16", num_heads = 16);
decode_backend!(CudaGraph: sm = "90", dtypes = "bf16", cuda_graph = "always");
decode_backend!(Sinks: sm = "90", dtypes = "bf16", sinks = true);
decode_backend!(SupportsFp8: sm = "90", dtypes = "bf16", supports_fp8 = true);
decode_backend!(Dtype: sm = "90", bf16 = true, dtype = "bf16");
decode_backend!(Causal: sm = "90", dtypes = "bf16", causal = true);
decode_backend!(KvCacheDtype: sm = "90", dtypes = "bf16", kv_cache_dtype = "fp8");
decode_backend!(HeadDim: sm = "90", dtypes = "bf16", head_dim = 128);
decode_backend!(NoContradiction: sm = "90", dtype = "f32", kv = "f32");
decode_backend!(NoPriority: dtypes = "bf16", arch = "80", priority = "80:1");

// Names and providers.

decode_backend!(Lower: sm = "90", dtypes = "bf16", name = "flash_attn");
decode_backend!(Dash: sm = "90", dtypes = "bf16", name = "FLASH-ATTN");
decode_backend!(Empty: sm = "90", dtypes = "bf16", name = "");
decode_backend!(Digit: sm = "90", dtypes = "bf16", name = "3FA");
decode_backend!(TwoUnderscores: sm = "90", dtypes = "bf16", name = "FLASH__ATTN");
decode_backend!(NotAscii: sm = "90", dtypes = "bf16", name = "FLÄCHE");
decode_backend!(ProviderEmpty: sm = "90", dtypes = "bf16", provider = "");
decode_backend!(ProviderSpace: sm = "90", dtypes = "bf16", provider = "flash infer");
decode_backend!(Größe: sm = "90", dtypes = "bf16", provider = "native");
decode_backend!(Reserved: sm = "90", dtypes = "bf16", name = "ALL");
decode_backend!(Auto: sm = "90", dtypes = "bf16");

// Values that are no literals, and other marks instead of the equals sign.

decode_backend!(Max: sm = "90", dtypes = "bf16", priority = i32::MAX);
decode_backend!(Sum: sm = "90", dtypes = "bf16", priority = 5 + 3);
decode_backend!(Constant: sm = "90", dtypes = "bf16", heads = HEADS);
decode_backend!(Call: sm = "90", dtypes = "bf16", alignment = size_of::<u128>());
decode_backend!(Suffix: sm = "90", dtypes = "bf16", alignment = 16u32);
decode_backend!(Float: sm = "90", dtypes = "bf16", max_query_len = 8.0);
decode_backend!(Hexadecimal: sm = "90", dtypes = "bf16", page_sizes = 0x40u8);
decode_backend!(Bytes: sm = "90", dtypes = "bf16", lse = b"log2");
decode_backend!(Letter: sm = "90", dtypes = "bf16", priority = '1');
decode_backend!(Wrapped: sm = "90", dtypes = "bf16", max_query_len = Some(8));
decode_backend!(Vector: sm = "90", dtypes = "bf16", heads = vec![16, 32]);
decode_backend!(Colon: dtypes = "bf16", sm: "any");
decode_backend!(Parentheses: dtypes = "bf16", sm("any"));
decode_backend!(Comparison: dtypes = "bf16", sm == "any");
decode_backend!(Arrow: dtypes = "bf16", sm => hopper);
decode_backend!(Nothing: dtypes = "bf16", sm "90");
decode_backend!(ProviderOfPackage: sm = "90", dtypes = "bf16", provider = env!("CARGO_PKG_NAME"));
decode_backend!(ProviderJoined: sm = "90", dtypes = "bf16", provider = concat!("a", "b"));
decode_backend!(NameJoined: sm = "90", dtypes = "bf16", name = concat!("A", "B"));
decode_backend!(Target: sm = "90", dtypes = "bf16", compiled = "sm_90a");
decode_backend!(TargetWithoutQuotes: sm = "90", dtypes = "bf16", compiled = compute_90);
decode_backend!(Gpu: sm = "90", dtypes = "bf16", run_on = "H200");

fn main() {}
