//! Names and values of other libraries, with their meaning here. Hints use these tables.

use std::borrow::Cow;

use crate::key::{self, Key};

/// The meaning of a text that a key does not accept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Meant {
    /// This value of the key.
    Value(Cow<'static, str>),
    /// No value of this key; the sentence says what to do instead.
    Advice(Cow<'static, str>),
}

/// Texts with one meaning, and that meaning. The texts are in lower case, separated by spaces, with
/// `_` for `-`.
type Synonym = (&'static str, Meant);

const fn to(value: &'static str) -> Meant {
    Meant::Value(Cow::Borrowed(value))
}

const fn say(sentence: &'static str) -> Meant {
    Meant::Advice(Cow::Borrowed(sentence))
}

/// Writes a table. Each row has texts, and then either `to` with the value they mean or `say` with
/// advice.
macro_rules! synonyms {
    ({ $($texts:literal $what:ident $meant:literal)* }) => { &[$(($texts, $what($meant))),*] };
}

macro_rules! values {
    ($([$($key:ident),+] $synonyms:tt)*) => {
        /// The tables of all keys that have one.
        pub(crate) const VALUES: &[(Key, &[Synonym])] =
            &[$($((key::$key, synonyms!($synonyms)),)+)*];
    };
}

values! {
    [DTYPES] {
        "float float32 fp32 single" to "f32"
        "half float16 fp16" to "f16"
        "bfloat16 bfloat brain" to "bf16"
        "fp8 f8 float8 e4m3 fp8_e4m3 float8_e4m3fn fp8_e5m2 e5m2 fp8_ds_mla \
         fp8_per_token" say
            "that is a format of the cache, which the key `kv` lists; queries and outputs have a \
             dtype"
        "any all * auto" say "a list names each, as in `f32,f16,bf16`"
    }
    [REQUIRES_R1, PLANS_ON_HOST, DEPENDENT_LAUNCH, QUANT_OUTPUT] {
        "true yes on 1 always supported" to "true"
        "false no off 0 never none unsupported" to "false"
    }
    [DIMS] {
        "all * every none" to "any"
        "r1 deepseek deepseek_r1 deepseek_v2 deepseek_v2_lite deepseek_v3 deepseek_v3.1 \
         deepseek_v3.2 kimi_k2" to "(128,64,128)"
        "glm_5 glm_5.1 glm_5.2" to "(192,64,256)"
        "minicpm3" to "(64,32,64)"
    }
    [CACHE_DIMS] {
        "all * every none" to "any"
        "r1 deepseek deepseek_r1 deepseek_v2 deepseek_v2_lite deepseek_v3 deepseek_v3.1 \
         deepseek_v3.2 kimi_k2 glm_5 glm_5.1 glm_5.2 576" to "(512,64)"
        "minicpm3" to "(256,32)"
    }
    [HEADS, PAGE_SIZES] { "all * every none" to "any" }
    [KV] {
        "float float32 fp32 single" to "f32"
        "half float16 fp16" to "f16"
        "bfloat16 bfloat brain" to "bf16"
        "f8 float8 e4m3 fp8_e4m3 fp8_e4m3fn float8_e4m3fn float8_e4m3" to "fp8"
        "ds_mla fp8_ds fp8_mla fp8_with_scales" to "fp8_ds_mla"
        "snapmla snap_mla per_token fp8_token" to "fp8_per_token"
        "e5m2 fp8_e5m2 float8_e5m2" say "`fp8` holds e4m3 values, and no format holds e5m2"
        "auto default same dtype dtypes none unquantised unquantized" say
            "leave the key out for the unquantised formats of the dtypes"
        "any all *" say "a list names each, as in `bf16,fp8`"
    }
    [QUERY_LEN] {
        "1 one decode single_token" to "single"
        "equal same fixed mtp uniform_batch" to "uniform"
        "varlen variable jagged any all mixed always" to "ragged"
    }
    [MAX_QUERY_LEN, MAX_LIST_WIDTH] {
        "none all * unlimited inf infinity" to "any"
        "u32::max usize::max i32::max -1 max" to "any"
    }
    [QUERY_FORMAT] {
        "separate apart two" to "split"
        "concat cat joined packed fused one" to "concatenated"
    }
    [KEY_LAYOUT] {
        "separate apart two" to "split"
        "concat cat concatenated joined fused one" to "packed"
    }
    [ALIGNMENT] { "any none natural element false" to "1" }
    [GRAPHS] {
        "false no none off eager unsupported piecewise" to "never"
        "true yes on supported enabled" say
            "say which batches: `single_token` for one token of each request, `uniform_batch` for \
             equal lengths, `always` for every batch"
        "full all any full_and_piecewise" to "always"
        "full_decode_only uniform equal" to "uniform_batch"
        "uniform_single_token_decode single decode one" to "single_token"
    }
    [LSE] {
        "false no off never 0" to "none"
        "true yes on natural nat e log log_e base_e" to "ln"
        "2 base2 base_2 binary log_2 lb exp2" to "log2"
    }
    [LSE_PRECISION] {
        "float float32 fp32 full exact single" to "f32"
        "f16 bf16 half float16 bfloat16 rounded input same" to "dtype"
    }
    [SPARSE] {
        "false no none off dense" to "never"
        "true yes on both any supported" to "optional"
        "only always sparse" to "required"
    }
    [FEATURES] {
        "sink attention_sinks attention_sink s_aux" to "sinks"
        "repeatable reproducible" to "deterministic"
        "batch_invariance invariant" to "batch_invariant"
        "nan nans" to "nan_propagation"
        "any all *" say "a list names each, as in `sinks,deterministic`"
        "causal" say "attention is causal without a feature: leave it out"
        "noncausal bidirectional" to "non_causal"
        "llama_4_scaling query_scale query_scaling" to "query_scales"
        "fp8 fp8_ds_mla fp8_per_token quantised_cache" say
            "a format of the cache stands in the key `kv`"
        "sparse sparsity topk" say "lists of slots are the key `sparse`"
        "lse log_sum_exp" say "the log-sum-exp is the key `lse`"
        "graphs cuda_graph cuda_graphs graph" say "graphs are the key `graphs`"
        "quant_output fp8_output" say "write `quant_output = true`"
        "varlen ragged mtp" say "lengths of queries are the key `query_len`"
    }
    [PROVIDER] {
        "env!(cargo_pkg_name) core::env!(cargo_pkg_name) std::env!(cargo_pkg_name)" say
            "without the key it is the package's name: leave it out"
    }
    [PRIORITY] {
        "i32::max max highest" to "2147483647"
        "i32::min min lowest" to "-2147483648"
        "none default any" to "0"
    }
}

/// Keys of other libraries, and the key that is meant. A row with only a key gives another name of
/// it. A row with a value also sets that value.
const KEYS_FROM_ELSEWHERE: &[Synonym] = synonyms!({
    "arch archs capability capabilities compute_capability cc gpu gpus sms min_sm compute \
     cuda_arch target_arch device platform" to "sm"
    "types precision float data_type data_types q_dtype" to "dtypes"
    "kv_cache kv_format kv_formats cache kv_dtype kv_dtypes kv_cache_dtype cache_dtype \
     cache_format cache_formats" to "kv"
    "block_size block_sizes pages page" to "page_sizes"
    "r1 deepseek_r1" to "requires_r1"
    "cfg features_of_cargo cargo_feature" to "feature"
    "targets families family kernels" to "compiled"
    "tested_on ran_on tested verified_on" to "run_on"
    "num_heads n_heads num_q_heads num_query_heads q_heads query_heads head_count head_counts \
     num_attention_heads" to "heads"
    "head_dim head_dims head_size head_sizes dim shape" to "dims"
    "latent kv_lora_rank lora_rank row rows" to "cache_dims"
    "cuda_graph cuda_graphs cudagraph cudagraphs cudagraph_support graph capture \
     supports_graphs supports_cuda_graph supports_cuda_graphs" to "graphs"
    "q_len query_lens varlen query_lengths lengths" to "query_len"
    "max_q_len max_seqlen_q mtp max_tokens" to "max_query_len"
    "topk top_k index_topk max_topk" to "max_list_width"
    "is_sparse supports_sparse sparsity" to "sparse"
    "align alignment_bytes" to "alignment"
    "return_lse lse_base log_sum_exp supports_lse" to "lse"
    "fp8_output output_quant quantised_output" to "quant_output"
    "vendor library author" to "provider"
    "backend id label" to "name"
    "prio rank weight order" to "priority"
    "runtime mla_runtime path krate" to "crate"
    "causal" say
        "attention is causal: leave the key out, or say `features = \"non_causal\"` of a backend \
         that can do without"
    "phase" say "the trait says the phase: leave the key out"
});

/// The prefixes of names that say that something can be done.
const PREFIXES: [&str; 5] = ["supports_", "has_", "with_", "is_", "use_"];

// Normalises a text: lower case, no quotes or spaces, and only one kind of dash.
fn normal(text: &str) -> String {
    text.to_lowercase()
        .replace(['"', ' '], "")
        .replace('-', "_")
}

/// The meaning of a value, from the tables.
pub(crate) fn of_value(key: &Key, text: &str) -> Option<Meant> {
    let (plain, normal) = (text.trim().to_lowercase(), normal(text));
    let (_, table) = VALUES.iter().find(|(other, _)| other == key)?;
    let says = |texts: &str| texts.split(' ').any(|it| it == normal || it == plain);
    let (_, meant) = table.iter().find(|(texts, _)| says(texts))?;
    Some(meant.clone())
}

/// The meaning of a key, from the tables. The result has the key, if there is one, and either its
/// name or a sentence with its value.
pub(crate) fn of_key(name: &str) -> Option<(Option<Key>, Meant)> {
    let name = normal(name);
    let mut foreign = KEYS_FROM_ELSEWHERE.iter();
    if let Some((_, meant)) = foreign.find(|(names, _)| names.split(' ').any(|it| it == name)) {
        let key = match meant {
            Meant::Value(meant) => key::KEYS.iter().find(|key| key.name == meant).copied(),
            Meant::Advice(_) => None,
        };
        return Some((key, meant.clone()));
    }
    let mut prefixes = PREFIXES.iter();
    let stem = prefixes.find_map(|prefix| name.strip_prefix(prefix));
    let stem = stem.unwrap_or(&name);
    let mut values = [key::FEATURES, key::DTYPES, key::KV].into_iter();
    values.find_map(|key| of_value_as_key(key, stem))
}

// The meaning of a value's name that was written as a key.
fn of_value_as_key(key: Key, name: &str) -> Option<(Option<Key>, Meant)> {
    let value = match of_value(&key, name) {
        Some(Meant::Value(value)) => value,
        _ if key::names(&key).iter().any(|it| it.text == name) => name.to_owned().into(),
        _ => return None,
    };
    let sentence = format!("write `{} = \"{value}\"`", key.name);
    Some((Some(key), Meant::Advice(sentence.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_keys_have_hints() {
        let is_key = |name: &str| key::KEYS.iter().any(|key| key.name == name);
        for (names, meant) in KEYS_FROM_ELSEWHERE {
            if let Meant::Value(meant) = meant {
                assert!(is_key(meant), "{meant}");
            }
            for name in names.split(' ') {
                assert!(!is_key(name), "{name}");
            }
        }
    }
}
