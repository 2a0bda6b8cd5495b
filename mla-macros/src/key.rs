//! The attribute's keys: the one table behind parsing, error messages, suggestions and `keys.md`.

use crate::place::Phase;
use crate::vocabulary;

/// The kind of literal of a key's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    /// A string; for a single element, an integer will do.
    Text,
    /// `true` or `false`.
    Flag,
    /// A path, bare or in a string.
    Path,
    /// A path, bare or in a string, or a list of them in a string.
    Paths,
}

/// One key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) form: Form,
    /// The phase whose backends alone have it.
    pub(crate) only: Option<Phase>,
    /// The default; `None` if the key must be given.
    pub(crate) default: Option<&'static str>,
    /// The accepted values, in the words of error messages.
    pub(crate) accepted: &'static str,
    /// A value, as it is written.
    pub(crate) example: &'static str,
    /// The property of the backend that it states.
    pub(crate) meaning: &'static str,
}

pub(crate) const SM: Key = Key {
    name: "sm",
    form: Form::Text,
    only: None,
    default: None,
    accepted: "`any`, `compiled`, or a list of capabilities: exact (`90`), a family (`10x`), a \
               floor (`80+`)",
    example: "\"90|100\"",
    meaning: "The compute capabilities it runs on; `any` for a processor, `compiled` for what \
              the key `compiled` lists.",
};

pub(crate) const COMPILED: Key = Key {
    name: "compiled",
    form: Form::Paths,
    only: None,
    default: Some(
        "the families that `feature` names, or all that mla-build compiled in the package",
    ),
    accepted: "the path of a constant that mla-build wrote, such as `raw::SM90`, or a list of \
               them, such as `raw::SM90|raw::SM100`",
    example: "\"raw::SM90|raw::SM100\"",
    meaning: "The targets that its kernels are compiled for. `sm` is held to them; of several \
              families, a GPU takes the first that runs there, and a family that is left out is a \
              reason. Needed where families have GPUs in common, unless `feature` names one of \
              these alone. In a package that does not build with mla-build, a GPU's backend \
              without it is chosen by its name alone.",
};

pub(crate) const FEATURE: Key = Key {
    name: "feature",
    form: Form::Text,
    only: None,
    default: Some("no feature: it is always compiled"),
    accepted: "Cargo features of the crate, such as `sm90` or `sm90|sm100`",
    example: "\"sm90\"",
    meaning: "The features that compile it, of which one has to be on. With all of them off the \
              block is left out, and the type stands in the registry and in lists as absent, with \
              the same spec.",
};

pub(crate) const RUN_ON: Key = Key {
    name: "run_on",
    form: Form::Path,
    only: None,
    default: Some("not said"),
    accepted: "the path of a `&[Run]`, such as `RUN_ON`",
    example: "RUN_ON",
    meaning: "The GPUs on which its tests passed. A backend that has run on no GPU that takes the \
              same code is selected by name only.",
};

pub(crate) const DTYPES: Key = Key {
    name: "dtypes",
    form: Form::Text,
    only: None,
    default: None,
    accepted: "a list of f32, f16, bf16",
    example: "\"f16,bf16\"",
    meaning: "The dtypes of queries and outputs.",
};

pub(crate) const REQUIRES_R1: Key = Key {
    name: "requires_r1",
    form: Form::Flag,
    only: None,
    default: Some("false"),
    accepted: "true or false",
    example: "true",
    meaning: "Short for `dims = \"(128,64,128)\"`, the dimensions of DeepSeek-R1.",
};

pub(crate) const DIMS: Key = Key {
    name: "dims",
    form: Form::Text,
    only: None,
    default: Some("any"),
    accepted: "`any`, or a list of (P,R,V) such as `(128,64,128)`",
    example: "\"(128,64,128)|(192,64,256)\"",
    meaning: "The per-head dimensions (P,R,V).",
};

pub(crate) const CACHE_DIMS: Key = Key {
    name: "cache_dims",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("any"),
    accepted: "`any`, or a list of (L,R) such as `(512,64)`",
    example: "\"(512,64)\"",
    meaning: "The latent and rotary widths (L,R) of a cache row.",
};

pub(crate) const HEADS: Key = Key {
    name: "heads",
    form: Form::Text,
    only: None,
    default: Some("any"),
    accepted: "`any`, a range such as `1..=128`, or a list such as `16|64|128`",
    example: "\"1..=128\"",
    meaning: "The numbers of query heads.",
};

pub(crate) const KV: Key = Key {
    name: "kv",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("the unquantised formats of the dtypes"),
    accepted: "a list of f32, f16, bf16, fp8, fp8_ds_mla",
    example: "\"bf16,fp8\"",
    meaning: "The cache formats.",
};

pub(crate) const PAGE_SIZES: Key = Key {
    name: "page_sizes",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("any"),
    accepted: "`any`, a list such as `32|64`, or `x16` for the multiples of 16",
    example: "\"32|64\"",
    meaning: "The tokens in a page of the cache.",
};

pub(crate) const QUERY_LEN: Key = Key {
    name: "query_len",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("single"),
    accepted: "single, uniform or ragged",
    example: "\"uniform\"",
    meaning: "The variation of the number of query tokens within a batch.",
};

pub(crate) const MAX_QUERY_LEN: Key = Key {
    name: "max_query_len",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("any"),
    accepted: "`any`, or a number from 1 up",
    example: "8",
    meaning: "The maximum number of new tokens of a request; longer requests go down the expanded \
              path.",
};

pub(crate) const QUERY_FORMAT: Key = Key {
    name: "query_format",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("split"),
    accepted: "split or concatenated",
    example: "\"concatenated\"",
    meaning: "The form of its queries: latent and rotary part apart, or side by side.",
};

pub(crate) const KEY_LAYOUT: Key = Key {
    name: "key_layout",
    form: Form::Text,
    only: Some(Phase::Prefill),
    default: Some("packed"),
    accepted: "packed or split",
    example: "\"split\"",
    meaning: "The form of its keys: the rotary part repeated for every head, or handed over once.",
};

pub(crate) const ALIGNMENT: Key = Key {
    name: "alignment",
    form: Form::Text,
    only: None,
    default: Some("1"),
    accepted: "a power of two from 1 up, in bytes",
    example: "16",
    meaning: "The divisor of its tensors' addresses and of the distances between their rows.",
};

pub(crate) const GRAPHS: Key = Key {
    name: "graphs",
    form: Form::Text,
    only: None,
    default: Some("never"),
    accepted: "never, single_token, uniform_batch or always",
    example: "\"uniform_batch\"",
    meaning: "The batches that can be captured in a CUDA graph and replayed.",
};

pub(crate) const PLANS_ON_HOST: Key = Key {
    name: "plans_on_host",
    form: Form::Flag,
    only: Some(Phase::Decode),
    default: Some("false"),
    accepted: "true or false",
    example: "true",
    meaning: "It plans a step on the host, from the lengths in `DecodeBatch::host`.",
};

pub(crate) const DEPENDENT_LAUNCH: Key = Key {
    name: "dependent_launch",
    form: Form::Flag,
    only: None,
    default: Some("false"),
    accepted: "true or false",
    example: "true",
    meaning: "Its kernels keep the contract of programmatic dependent launch, which stands at \
              `mla_runtime::backend`. If they do not, the device lets no kernel before or behind a \
              call overlap it.",
};

pub(crate) const LSE: Key = Key {
    name: "lse",
    form: Form::Text,
    only: None,
    default: Some("ln"),
    accepted: "none, ln or log2",
    example: "\"log2\"",
    meaning: "The base of the log-sum-exp that the kernel writes; prefill has to write one.",
};

pub(crate) const LSE_PRECISION: Key = Key {
    name: "lse_precision",
    form: Form::Text,
    only: None,
    default: Some("f32"),
    accepted: "f32 or dtype",
    example: "\"dtype\"",
    meaning: "The precision of the log-sum-exp: `dtype` if the kernel sums weights that it rounded \
              to the dtype, which moves it by up to 2^-11 in f16 and 2^-8 in bf16.",
};

pub(crate) const QUANT_OUTPUT: Key = Key {
    name: "quant_output",
    form: Form::Flag,
    only: None,
    default: Some("false"),
    accepted: "true or false",
    example: "true",
    meaning: "It can write a quantised output.",
};

pub(crate) const SPARSE: Key = Key {
    name: "sparse",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("never"),
    accepted: "never, optional or required",
    example: "\"optional\"",
    meaning: "It attends to lists of slots.",
};

pub(crate) const MAX_LIST_WIDTH: Key = Key {
    name: "max_list_width",
    form: Form::Text,
    only: Some(Phase::Decode),
    default: Some("any"),
    accepted: "`any`, or a number from 1 up",
    example: "8192",
    meaning: "The maximum number of entries of a list of slots.",
};

pub(crate) const FEATURES: Key = Key {
    name: "features",
    form: Form::Text,
    only: None,
    default: Some("none"),
    accepted: "`none`, or a list of alibi_slopes, sliding_window, block_sparsity, logits_soft_cap, \
               encoder_attention, cross_attention, sinks, deterministic, nan_propagation, \
               strided_outputs, dense_requests, second_cache, split_cache, \
               non_causal",
    example: "\"sinks,deterministic\"",
    meaning: "Abilities beyond plain causal attention.",
};

pub(crate) const NAME: Key = Key {
    name: "name",
    form: Form::Text,
    only: None,
    default: Some("the type's name in UPPER_SNAKE_CASE"),
    accepted: "ASCII letters in upper case, digits and single underscores, such as `FLASH_ATTN`",
    example: "\"FLASH_ATTN\"",
    meaning: "The name by which it is chosen.",
};

pub(crate) const PROVIDER: Key = Key {
    name: "provider",
    form: Form::Text,
    only: None,
    default: Some("the package's name"),
    accepted: "ASCII letters, digits, `-`, `_` and `.`, such as `flashinfer`",
    example: "\"flashinfer\"",
    meaning: "The kernel's provider.",
};

pub(crate) const PRIORITY: Key = Key {
    name: "priority",
    form: Form::Text,
    only: None,
    default: Some("0"),
    accepted: "an integer, or one per capability such as `90:100,10x:50,*:0`",
    example: "\"90:100,10x:50,*:0\"",
    meaning: "The order in which it is tried: higher first. The first capability that matches \
              decides; `*` is everything else, and 0 where it is not written.",
};

pub(crate) const CRATE: Key = Key {
    name: "crate",
    form: Form::Path,
    only: None,
    default: Some("::mla_runtime"),
    accepted: "a path, such as `::mla_runtime`",
    example: "::engine::mla_runtime",
    meaning: "The path of `mla-runtime`, for a crate that renames or re-exports it and whose \
              compiler finds no `mla_runtime`.",
};

/// Every key, in the order of the documentation.
pub(crate) const KEYS: &[Key] = &[
    SM,
    COMPILED,
    FEATURE,
    RUN_ON,
    DTYPES,
    REQUIRES_R1,
    DIMS,
    CACHE_DIMS,
    HEADS,
    KV,
    PAGE_SIZES,
    QUERY_LEN,
    MAX_QUERY_LEN,
    QUERY_FORMAT,
    KEY_LAYOUT,
    ALIGNMENT,
    GRAPHS,
    PLANS_ON_HOST,
    DEPENDENT_LAUNCH,
    LSE,
    LSE_PRECISION,
    QUANT_OUTPUT,
    SPARSE,
    MAX_LIST_WIDTH,
    FEATURES,
    NAME,
    PROVIDER,
    PRIORITY,
    CRATE,
];

const _: () = assert!(
    lists(KV.accepted, vocabulary::KV_FORMATS),
    "KV.accepted has other names than vocabulary::KV_FORMATS"
);

// True if a text says `a list of` these names.
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
        // Behind a comma and a space comes the next.
        if n < names.len() {
            at += 2;
        }
    }
    at == text.len()
}

/// The table in the attribute's documentation.
/// The names that a key's value is, or that it lists; none where it takes others as well.
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
        for (key, names) in [
            (DTYPES, vocabulary::DTYPES),
            (KV, vocabulary::KV_FORMATS),
            (QUERY_LEN, vocabulary::QUERY_LENS),
            (QUERY_FORMAT, vocabulary::QUERY_FORMATS),
            (KEY_LAYOUT, vocabulary::KEY_LAYOUTS),
            (GRAPHS, vocabulary::GRAPHS),
            (LSE, vocabulary::LSES),
            (LSE_PRECISION, vocabulary::LSE_PRECISIONS),
            (SPARSE, vocabulary::SPARSE),
            (FEATURES, vocabulary::FEATURES),
        ] {
            let words: Vec<&str> = key
                .accepted
                .trim_start_matches("`none`, or ")
                .trim_start_matches("a list of ")
                .split([',', ' '])
                .filter(|word| !word.is_empty() && *word != "or")
                .collect();
            let names: Vec<&str> = names.iter().map(|name| name.text).collect();
            assert_eq!(words, names, "{}", key.name);
        }
    }
}
