//! The attribute's keys. This table is the source of parsing, error messages, suggestions and
//! `keys.md`.

use crate::place::Phase;
use crate::vocabulary;

/// The kind of literal of a key's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    /// A string. A single element may also be an integer.
    Text,
    /// `true` or `false`.
    Flag,
    /// A path, bare or in a string.
    Path,
    /// A path, bare or in a string, or several paths in a string.
    Paths,
}

/// One key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) form: Form,
    /// The only phase whose backends have the key; `None` if both have it.
    pub(crate) only: Option<Phase>,
    /// The default; `None` if the key must be given.
    pub(crate) default: Option<&'static str>,
    /// The accepted values, in the words of error messages.
    pub(crate) accepted: &'static str,
    /// An example of a value, as an attribute has it.
    pub(crate) example: &'static str,
    /// The property of the backend that the key sets.
    pub(crate) meaning: &'static str,
}

/// Defines each key, and the list of all keys in the order of the documentation. A key has its name
/// in the code and in attributes, its form, its phase or none, an example and the default. The
/// accepted values and the meaning follow.
macro_rules! keys {
    ($($key:ident = $name:literal, $form:ident, $only:expr, $example:literal, $default:expr,
        $accepted:literal, $meaning:literal;)*) => {
        $(pub(crate) const $key: Key = Key {
            name: $name,
            form: Form::$form,
            only: $only,
            default: $default,
            accepted: $accepted,
            example: $example,
            meaning: $meaning,
        };)*
        /// Every key, in the order of the documentation.
        pub(crate) const KEYS: &[Key] = &[$($key),*];
    };
}

const EITHER: Option<Phase> = None;
const PREFILL: Option<Phase> = Some(Phase::Prefill);
const DECODE: Option<Phase> = Some(Phase::Decode);

keys! {
    SM = "sm", Text, EITHER, "\"90|100\"", None,
        "`any`, `compiled`, or a list of capabilities: exact (`90`), a family (`10x`), a floor \
         (`80+`)",
        "The compute capabilities that the backend runs on. `any` is for a processor. \
         `compiled` stands for the targets that the key `compiled` lists.";
    COMPILED = "compiled", Paths, EITHER, "\"raw::SM90|raw::SM100\"",
        Some("the families that `feature` names, or all that mla-build compiled in the package"),
        "the path of a constant that mla-build wrote, such as `raw::SM90`, or a list of them, \
         such as `raw::SM90|raw::SM100`",
        "The targets that its kernels are compiled for. `sm` is checked against them. If there \
         are several families, a GPU uses the first that runs there. A family that this build \
         leaves out is a reason against the backend. The key is needed if families have GPUs in \
         common, unless `feature` names only one of these. Without the key, in a package that \
         does not build with mla-build, a backend for GPUs is selected only by its name.";
    FEATURE = "feature", Text, EITHER, "\"sm90\"", Some("no feature: it is always compiled"),
        "Cargo features of the crate, such as `sm90` or `sm90|sm100`",
        "The features that compile the backend. One of them has to be on. If all are off, the \
         block is left out. The registry and lists then contain the type as absent, with the \
         same spec.";
    RUN_ON = "run_on", Path, EITHER, "RUN_ON", Some("not said"),
        "the path of a `&[Run]`, such as `RUN_ON`",
        "The GPUs on which its tests passed. A backend that has not run on a GPU with the same \
         code is selected only by its name.";
    DTYPES = "dtypes", Text, EITHER, "\"f16,bf16\"", None,
        "a list of f32, f16, bf16",
        "The dtypes of queries and outputs.";
    REQUIRES_R1 = "requires_r1", Flag, EITHER, "true", Some("false"),
        "true or false",
        "Short for `dims = \"(128,64,128)\"`, the dimensions of DeepSeek-R1.";
    DIMS = "dims", Text, EITHER, "\"(128,64,128)|(192,64,256)\"", Some("any"),
        "`any`, or a list of (P,R,V) such as `(128,64,128)`",
        "The per-head dimensions (P,R,V).";
    CACHE_DIMS = "cache_dims", Text, DECODE, "\"(512,64)\"", Some("any"),
        "`any`, or a list of (L,R) such as `(512,64)`",
        "The latent and rotary widths (L,R) of a cache row.";
    HEADS = "heads", Text, EITHER, "\"1..=128\"", Some("any"),
        "`any`, a range such as `1..=128`, or a list such as `16|64|128`",
        "The numbers of query heads.";
    KV = "kv", Text, DECODE, "\"bf16,fp8\"", Some("the unquantised formats of the dtypes"),
        "a list of f32, f16, bf16, fp8, fp8_ds_mla, fp8_per_token",
        "The cache formats.";
    PAGE_SIZES = "page_sizes", Text, DECODE, "\"32|64\"", Some("any"),
        "`any`, a list such as `32|64`, or `x16` for the multiples of 16",
        "The number of tokens in a page of the cache.";
    QUERY_LEN = "query_len", Text, DECODE, "\"uniform\"", Some("single"),
        "single, uniform or ragged",
        "The variation of the number of query tokens within a batch.";
    MAX_QUERY_LEN = "max_query_len", Text, DECODE, "8", Some("any"),
        "`any`, or a number from 1 up",
        "The maximum number of new tokens of a request; longer requests go down the expanded \
         path.";
    QUERY_FORMAT = "query_format", Text, DECODE, "\"concatenated\"", Some("split"),
        "split or concatenated",
        "The format of its queries: latent and rotary part in separate tensors, or side by side \
         in one.";
    KEY_LAYOUT = "key_layout", Text, PREFILL, "\"split\"", Some("packed"),
        "packed or split",
        "The layout of its keys: the rotary part repeated for every head, or once in a separate \
         tensor.";
    ALIGNMENT = "alignment", Text, EITHER, "16", Some("1"),
        "a power of two from 1 up, in bytes",
        "The addresses of its tensors and the distances between their rows must be multiples of \
         this.";
    GRAPHS = "graphs", Text, EITHER, "\"uniform_batch\"", Some("never"),
        "never, single_token, uniform_batch or always",
        "The batches that can be captured in a CUDA graph and replayed.";
    PLANS_ON_HOST = "plans_on_host", Flag, DECODE, "true", Some("false"),
        "true or false",
        "True if it plans a step on the host, from the lengths in `DecodeBatch::host`.";
    DEPENDENT_LAUNCH = "dependent_launch", Flag, EITHER, "true", Some("false"),
        "true or false",
        "True if its kernels keep the contract of programmatic dependent launch (see \
         `mla_runtime::backend`). If they do not, the device lets no kernel before or after a \
         call overlap the call.";
    LSE = "lse", Text, EITHER, "\"log2\"", Some("ln"),
        "none, ln or log2",
        "The base of the log-sum-exp that the kernel writes; prefill has to write one.";
    LSE_PRECISION = "lse_precision", Text, EITHER, "\"dtype\"", Some("f32"),
        "f32 or dtype",
        "The precision of the log-sum-exp. It is `dtype` if the kernel sums weights that it \
         rounded to the dtype. This changes the log-sum-exp by up to 2^-11 in f16 and 2^-8 in \
         bf16.";
    QUANT_OUTPUT = "quant_output", Flag, EITHER, "true", Some("false"),
        "true or false",
        "True if it can write a quantised output.";
    SPARSE = "sparse", Text, DECODE, "\"optional\"", Some("never"),
        "never, optional or required",
        "The support of lists of slots.";
    MAX_LIST_WIDTH = "max_list_width", Text, DECODE, "8192", Some("any"),
        "`any`, or a number from 1 up",
        "The maximum number of entries in a list of slots.";
    FEATURES = "features", Text, EITHER, "\"sinks,deterministic\"", Some("none"),
        "`none`, or a list of sinks, deterministic, batch_invariant, nan_propagation, \
         strided_outputs, dense_requests, second_cache, split_cache, non_causal, query_scales",
        "Abilities beyond plain causal attention.";
    NAME = "name", Text, EITHER, "\"FLASH_ATTN\"", Some("the type's name in UPPER_SNAKE_CASE"),
        "ASCII letters in upper case, digits and single underscores, such as `FLASH_ATTN`",
        "The name by which the backend is chosen.";
    PROVIDER = "provider", Text, EITHER, "\"flashinfer\"", Some("the package's name"),
        "ASCII letters, digits, `-`, `_` and `.`, such as `flashinfer`",
        "The kernel's provider.";
    PRIORITY = "priority", Text, EITHER, "\"90:100,10x:50,*:0\"", Some("0"),
        "an integer, or one per capability such as `90:100,10x:50,*:0`",
        "The order in which backends are tried, the highest priority first. The first \
         capability that matches decides. `*` stands for all others; if it is left out, their \
         priority is 0.";
    CRATE = "crate", Path, EITHER, "::engine::mla_runtime", Some("::mla_runtime"),
        "a path, such as `::mla_runtime`",
        "The path of `mla-runtime`. It is needed in a crate that renames or re-exports it and \
         has no `mla_runtime` itself.";
}

const _: () = assert!(
    lists(KV.accepted, vocabulary::KV_FORMATS),
    "KV.accepted has other names than vocabulary::KV_FORMATS"
);

// Returns true if the text is `a list of` these names.
const fn lists(text: &str, names: &[vocabulary::Name]) -> bool {
    let text = text.as_bytes();
    let mut at = "a list of ".len();
    let mut n = 0;
    while n < names.len() {
        let (name, mut i) = (names[n].text.as_bytes(), 0);
        while i < name.len() {
            if at >= text.len() || text[at] != name[i] {
                return false;
            }
            (at, i) = (at + 1, i + 1);
        }
        n += 1;
        // A comma and a space separate the names.
        if n < names.len() {
            at += 2;
        }
    }
    at == text.len()
}

/// The names among which a key's value is chosen; empty if it also takes other values.
pub(crate) fn names(key: &Key) -> &'static [vocabulary::Name] {
    match *key {
        DTYPES => vocabulary::DTYPES,
        KV => vocabulary::KV_FORMATS,
        QUERY_LEN => vocabulary::QUERY_LENS,
        QUERY_FORMAT => vocabulary::QUERY_FORMATS,
        KEY_LAYOUT => vocabulary::KEY_LAYOUTS,
        GRAPHS => vocabulary::GRAPHS,
        LSE => vocabulary::LSES,
        LSE_PRECISION => vocabulary::LSE_PRECISIONS,
        SPARSE => vocabulary::SPARSE,
        FEATURES => vocabulary::FEATURES,
        _ => &[],
    }
}

/// Writes the table in the attribute's documentation.
#[cfg(test)]
pub(crate) fn markdown() -> String {
    let mut table =
        String::from("| key | example | accepted | default | meaning |\n|---|---|---|---|---|\n");
    let code = |text: &str| format!("`{}`", text.replace('|', "\\|"));
    for key in KEYS {
        let phase = match key.only {
            Some(Phase::Decode) => " Decode only.",
            Some(Phase::Prefill) => " Prefill only.",
            None => "",
        };
        table += &format!(
            "| `{}` | {} | {} | {} | {}{phase} |\n",
            key.name,
            code(key.example),
            key.accepted.replace('|', "\\|"),
            key.default.unwrap_or("must be given"),
            key.meaning.replace('|', "\\|"),
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_table_is_this_one() {
        crate::golden::check("keys.md", &markdown());
    }

    #[test]
    fn names_match_the_vocabulary() {
        for key in KEYS.iter().filter(|key| !names(key).is_empty()) {
            let words: Vec<&str> = key
                .accepted
                .trim_start_matches("`none`, or ")
                .trim_start_matches("a list of ")
                .split([',', ' '])
                .filter(|word| !word.is_empty() && *word != "or")
                .collect();
            let names: Vec<&str> = names(key).iter().map(|name| name.text).collect();
            assert_eq!(words, names, "{}", key.name);
        }
    }
}
