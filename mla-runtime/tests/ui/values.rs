// Values that a key does not accept.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

// The compute capabilities.

decode_backend!(Empty: sm = "", dtypes = "bf16");
decode_backend!(Gap: sm = "90||100", dtypes = "bf16");
decode_backend!(Trailing: sm = "90|", dtypes = "bf16");
decode_backend!(LetterO: sm = "9o", dtypes = "bf16");
decode_backend!(Prefixed: sm = "sm_90a|sm_100", dtypes = "bf16");
decode_backend!(MajorOnly: sm = "9", dtypes = "bf16");
decode_backend!(Word: sm = "hopper", dtypes = "bf16");
decode_backend!(AtLeast: sm = ">=80", dtypes = "bf16");
decode_backend!(LeadingZero: sm = "090", dtypes = "bf16");
decode_backend!(Overflow: sm = "99999", dtypes = "bf16");
decode_backend!(ArabicDigits: sm = "٩٠", dtypes = "bf16");
decode_backend!(Newline: sm = "90\n", dtypes = "bf16");
decode_backend!(Twice: sm = "90|90", dtypes = "bf16");
decode_backend!(BesideAny: sm = "90|any", dtypes = "bf16");
decode_backend!(InFloor: sm = "80+|90", dtypes = "bf16");
decode_backend!(InFamily: sm = "103|10x", dtypes = "bf16");
decode_backend!(Floors: sm = "90+|80+", dtypes = "bf16");
decode_backend!(FamilyInFloor: sm = "10x|80+", dtypes = "bf16");
decode_backend!(Float: sm = 9.0, dtypes = "bf16");
decode_backend!(Unquoted: sm = 90|100, dtypes = "bf16");
decode_backend!(Boolean: sm = true, dtypes = "bf16");

// The dtypes of queries and outputs.

decode_backend!(Empty: sm = "90", dtypes = "");
decode_backend!(Blank: sm = "90", dtypes = "  ");
decode_backend!(Gap: sm = "90", dtypes = "f16,,bf16");
decode_backend!(Leading: sm = "90", dtypes = ",bf16");
decode_backend!(Near: sm = "90", dtypes = "bf61");
decode_backend!(Foreign: sm = "90", dtypes = "float16, bfloat16");
decode_backend!(Case: sm = "90", dtypes = "BF16");
decode_backend!(Far: sm = "90", dtypes = "int8");
decode_backend!(Twice: sm = "90", dtypes = "bf16,f16,bf16");
decode_backend!(Unquoted: sm = "90", dtypes = bf16);
decode_backend!(Number: sm = "90", dtypes = 16);
decode_backend!(Bytes: sm = "90", dtypes = b"bf16");
decode_backend!(Spaces: sm = "90", dtypes = "f16 bf16");

// Per-head dimensions and cache rows.

decode_backend!(Empty: sm = "90", dtypes = "bf16", dims = "");
decode_backend!(Two: sm = "90", dtypes = "bf16", dims = "(128,64)");
decode_backend!(Bare: sm = "90", dtypes = "bf16", dims = "128,64,128");
decode_backend!(Open: sm = "90", dtypes = "bf16", dims = "(128,64,128");
decode_backend!(Zero: sm = "90", dtypes = "bf16", dims = "(0,64,128)");
decode_backend!(ZeroValue: sm = "90", dtypes = "bf16", dims = "(128,64,0)");
decode_backend!(Negative: sm = "90", dtypes = "bf16", dims = "(128,-64,128)");
decode_backend!(Overflow: sm = "90", dtypes = "bf16", dims = "(4294967296,64,128)");
decode_backend!(Twice: sm = "90", dtypes = "bf16", dims = "(128,64,128)|(128, 64, 128)");
decode_backend!(BesideAny: sm = "90", dtypes = "bf16", dims = "any|(128,64,128)");
decode_backend!(Unquoted: sm = "90", dtypes = "bf16", dims = (128, 64, 128));
decode_backend!(BothWays: sm = "90", dtypes = "bf16", requires_r1 = true, dims = "(192,64,256)");
decode_backend!(CacheThree: sm = "90", dtypes = "bf16", cache_dims = "(512,64,128)");
decode_backend!(CacheZero: sm = "90", dtypes = "bf16", cache_dims = "(0,64)");
decode_backend!(CacheTwice: sm = "90", dtypes = "bf16", cache_dims = "(512,64)|(512,64)");
decode_backend!(OtherRope: sm = "90", dtypes = "bf16", dims = "(64,32,64)", cache_dims = "(512,64)");

// Head counts and page sizes.

decode_backend!(HeadsEmpty: sm = "90", dtypes = "bf16", heads = "");
decode_backend!(HeadsZero: sm = "90", dtypes = "bf16", heads = "0");
decode_backend!(HeadsReversed: sm = "90", dtypes = "bf16", heads = "128..=1");
decode_backend!(HeadsFromZero: sm = "90", dtypes = "bf16", heads = "0..=128");
decode_backend!(HeadsExclusive: sm = "90", dtypes = "bf16", heads = "1..128");
decode_backend!(HeadsOpen: sm = "90", dtypes = "bf16", heads = "1..=");
decode_backend!(HeadsTwice: sm = "90", dtypes = "bf16", heads = "16|16");
decode_backend!(HeadsMixed: sm = "90", dtypes = "bf16", heads = "16|32..=64");
decode_backend!(HeadsAny: sm = "90", dtypes = "bf16", heads = "any|16");
decode_backend!(HeadsNegative: sm = "90", dtypes = "bf16", heads = -16);
decode_backend!(HeadsOverflow: sm = "90", dtypes = "bf16", heads = "4294967296");
decode_backend!(PageZero: sm = "90", dtypes = "bf16", page_sizes = "0");
decode_backend!(PageZeroNumber: sm = "90", dtypes = "bf16", page_sizes = 0);
decode_backend!(PageZeroInList: sm = "90", dtypes = "bf16", page_sizes = "32|0");
decode_backend!(PageMultipleZero: sm = "90", dtypes = "bf16", page_sizes = "x0");
decode_backend!(PageMultiple: sm = "90", dtypes = "bf16", page_sizes = "x");
decode_backend!(PageSigned: sm = "90", dtypes = "bf16", page_sizes = "+64");
decode_backend!(PageTwice: sm = "90", dtypes = "bf16", page_sizes = "64,64");
decode_backend!(PageMixed: sm = "90", dtypes = "bf16", page_sizes = "x16|64");
decode_backend!(PageEmpty: sm = "90", dtypes = "bf16", page_sizes = "");

// Cache formats, levels and features.

decode_backend!(KvEmpty: sm = "90", dtypes = "bf16", kv = "");
decode_backend!(KvNear: sm = "90", dtypes = "bf16", kv = "fp8_dsmla");
decode_backend!(KvForeign: sm = "90", dtypes = "bf16", kv = "bf16,fp8_e4m3");
decode_backend!(KvTwice: sm = "90", dtypes = "bf16", kv = "bf16,bf16");
decode_backend!(QueryLen: sm = "90", dtypes = "bf16", query_len = "raged");
decode_backend!(QueryLenEmpty: sm = "90", dtypes = "bf16", query_len = "");
decode_backend!(QueryLenList: sm = "90", dtypes = "bf16", query_len = "single|uniform");
decode_backend!(Lse: sm = "90", dtypes = "bf16", lse = "log");
decode_backend!(LseCase: sm = "90", dtypes = "bf16", lse = "LN");
decode_backend!(Sparse: sm = "90", dtypes = "bf16", sparse = "allways");
decode_backend!(QuantOutput: sm = "90", dtypes = "bf16", quant_output = yes);
decode_backend!(FeatureNear: sm = "90", dtypes = "bf16", features = "sink");
decode_backend!(FeatureFar: sm = "90", dtypes = "bf16", features = "sinks,telepathy");
decode_backend!(FeatureTwice: sm = "90", dtypes = "bf16", features = "sinks|sinks");
decode_backend!(FeatureEmpty: sm = "90", dtypes = "bf16", features = "");

// Priorities.

decode_backend!(Word: sm = "90", dtypes = "bf16", priority = "high");
decode_backend!(Empty: sm = "90", dtypes = "bf16", priority = "");
decode_backend!(Overflow: sm = "90", dtypes = "bf16", priority = 2147483648);
decode_backend!(Fraction: sm = "90", dtypes = "bf16", priority = 1.5);
decode_backend!(NoNumber: sm = "90", dtypes = "bf16", priority = "90:,*:0");
decode_backend!(NoCapability: sm = "90", dtypes = "bf16", priority = ":100");
decode_backend!(NoColon: sm = "90", dtypes = "bf16", priority = "90:1,*");
decode_backend!(Any: sm = "90", dtypes = "bf16", priority = "any:1");
decode_backend!(Outside: sm = "90", dtypes = "bf16", priority = "100:50,*:0");
decode_backend!(TwoOtherwise: sm = "90", dtypes = "bf16", priority = "*:0,*:1");
decode_backend!(Behind: sm = "90", dtypes = "bf16", priority = "9x:5,90:10");
decode_backend!(BehindOtherwise: sm = "90", dtypes = "bf16", priority = "*:0,90:10");
decode_backend!(BadCapability: sm = "90", dtypes = "bf16", priority = "hopper:3");

fn main() {}
