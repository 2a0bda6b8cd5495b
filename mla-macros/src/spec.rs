//! What the arguments say about a backend: the runtime's `BackendSpec`, with defaults filled in.

use heck::ToShoutySnakeCase;
use proc_macro2::Span;
use syn::Path;
use syn::spanned::Spanned;

use crate::arguments::Arguments;
use crate::capability::{self, Capabilities};
use crate::contradiction::{self, Contradiction};
use crate::dims::{self, Heads, PageSizes};
use crate::errors::{Errors, Fault};
use crate::key::{self, KEYS, Key};
use crate::list::{self, quoted};
use crate::place::{Phase, Place, compact};
use crate::priority::{self, Priority};
use crate::vocabulary::{self, Name};

/// Every field as the expansion writes it, except the platform, which is the device's.
pub(crate) struct Spec {
    pub(crate) name: String,
    /// `None`: the package's name, which the compiler knows.
    pub(crate) provider: Option<String>,
    pub(crate) phase: Phase,
    /// `None`: whatever the kernels are compiled for.
    pub(crate) sm: Option<Vec<Capabilities>>,
    /// The constants with the targets of each family; none where the key is not given.
    pub(crate) compiled: Vec<Path>,
    /// The Cargo features of which one compiles it; none where it is always compiled.
    pub(crate) features_of_cargo: Vec<String>,
    /// The table of the GPUs that its tests passed on.
    pub(crate) run_on: Option<Path>,
    pub(crate) dtypes: Vec<Name>,
    pub(crate) dims: Option<Vec<[u32; 3]>>,
    pub(crate) cache_dims: Option<Vec<[u32; 2]>>,
    pub(crate) heads: Heads,
    pub(crate) kv: Vec<Name>,
    pub(crate) page_sizes: PageSizes,
    pub(crate) query_len: Name,
    /// `None`: any number.
    pub(crate) max_query_len: Option<u32>,
    pub(crate) query_format: Name,
    pub(crate) key_layout: Name,
    pub(crate) padded_values: bool,
    pub(crate) alignment: u32,
    pub(crate) graphs: Name,
    pub(crate) plans_on_host: bool,
    pub(crate) lse: Name,
    pub(crate) lse_precision: Name,
    pub(crate) quant_output: bool,
    pub(crate) sparse: Name,
    /// `None`: any number.
    pub(crate) max_list_width: Option<u32>,
    pub(crate) features: Vec<Name>,
    pub(crate) priority: Priority,
}

/// (P, R, V) of DeepSeek-R1.
const R1: [u32; 3] = [128, 64, 128];

impl Spec {
    /// Reads every key and reports what is wrong with each, and with them together. Without a
    /// place, which is an error already, only the keys themselves can be wrong.
    pub(crate) fn read(arguments: &Arguments, place: Option<&Place>, errors: &mut Errors) -> Self {
        let phase = place.map(|place| place.phase);
        check_presence(arguments, phase, errors);
        let mut reader = Reader {
            arguments,
            errors,
            faulty: Vec::new(),
        };
        let mut spec = reader.spec(phase.unwrap_or(Phase::Decode));
        if let Some(place) = place {
            reader.contradictions(&spec);
            if !arguments.has(&key::NAME) && !place.generic {
                spec.name = default_name(place, errors);
            }
        }
        spec
    }
}

// Keys that are missing, that the phase does not have, or that stand beside another.
fn check_presence(arguments: &Arguments, phase: Option<Phase>, errors: &mut Errors) {
    for key in KEYS {
        if key.default.is_none() && arguments.misses(key) {
            errors.fault(
                Span::call_site(),
                key.name,
                Fault::new("none", key.accepted)
                    .hint(format!("write `{} = {}`", key.name, key.example)),
            );
        }
        if let Some(phase) = phase
            && key.only.is_some_and(|only| only != phase)
            && arguments.has(key)
        {
            let hint = match phase {
                Phase::Prefill => "only a decode backend reads the cache: remove the key",
                Phase::Decode => {
                    "only a prefill backend has keys and values of its own: remove the key"
                }
            };
            let given = format!("a value on `impl {}`", phase.backend());
            errors.fault(
                arguments.span(key),
                key.name,
                Fault::new(given, "none").hint(hint),
            );
        }
    }
    if arguments
        .text(&key::SM)
        .is_some_and(capability::is_compiled)
    {
        check_compiled(arguments, errors);
    }
    if arguments.has(&key::REQUIRES_R1) && arguments.has(&key::DIMS) {
        errors.fault(
            arguments.span(&key::REQUIRES_R1),
            key::REQUIRES_R1.name,
            Fault::new("a value beside `dims`", "one of the two")
                .hint("`requires_r1 = true` is short for `dims = \"(128,64,128)\"`"),
        );
    }
}

// `sm = "compiled"` takes what another key lists, and needs it always.
fn check_compiled(arguments: &Arguments, errors: &mut Errors) {
    let mut fault = |fault| errors.fault(arguments.span(&key::SM), key::SM.name, fault);
    if !arguments.has(&key::COMPILED) {
        fault(
            Fault::new("`compiled` without the key `compiled`", "both").hint(format!(
                "add `{} = {}`",
                key::COMPILED.name,
                key::COMPILED.example
            )),
        );
    }
    if arguments.has(&key::FEATURE) {
        fault(
            Fault::new("`compiled` beside `feature`", "capabilities").hint(
                "with the feature off nothing is compiled, and the spec says the same all the same",
            ),
        );
    }
}

fn default_name(place: &Place, errors: &mut Errors) -> String {
    let given = match place.default_name() {
        Some(name) if is_upper_snake(&name) => return name,
        Some(name) => format!("none, and the type's name gives {}", quoted(&name)),
        None => format!(
            "none, and `{}` is not the name of one type",
            compact(&place.self_type)
        ),
    };
    let fault = Fault::new(given, key::NAME.accepted);
    let hint = format!("write `{} = {}`", key::NAME.name, key::NAME.example);
    errors.fault(place.self_type.span(), key::NAME.name, fault.hint(hint));
    String::new()
}

// Reads the values of one attribute, key by key.
struct Reader<'a> {
    arguments: &'a Arguments,
    errors: &'a mut Errors,
    // Keys whose values were reported: what contradicts them would only be noise.
    faulty: Vec<Key>,
}

impl Reader<'_> {
    fn spec(&mut self, phase: Phase) -> Spec {
        let decode = phase == Phase::Decode;
        let dtypes = self.names(&key::DTYPES, vocabulary::DTYPES);
        let kv = self.kv(&dtypes);
        let dims = self.text(&key::DIMS, dims::head);
        let query_len = self.name(&key::QUERY_LEN, vocabulary::QUERY_LENS);
        Spec {
            name: self.text_or(&key::NAME, "UNNAMED", name),
            provider: (self.arguments.has(&key::PROVIDER))
                .then(|| self.text(&key::PROVIDER, provider)),
            phase,
            sm: self.text(&key::SM, capability::sm),
            compiled: self.arguments.paths(&key::COMPILED).to_vec(),
            features_of_cargo: match self.arguments.text(&key::FEATURE) {
                Some(_) => self.text(&key::FEATURE, feature),
                None => Vec::new(),
            },
            run_on: self.arguments.path(&key::RUN_ON).cloned(),
            dtypes,
            dims: match self.arguments.flag(&key::REQUIRES_R1) {
                Some(true) => Some(vec![R1]),
                _ => dims,
            },
            cache_dims: self.text(&key::CACHE_DIMS, dims::cache),
            heads: self.text(&key::HEADS, dims::heads),
            kv: if decode { kv } else { Vec::new() },
            page_sizes: self.text(&key::PAGE_SIZES, dims::page_sizes),
            query_len: if decode {
                query_len
            } else {
                vocabulary::RAGGED
            },
            max_query_len: self.text(&key::MAX_QUERY_LEN, dims::any_or_positive),
            query_format: self.name(&key::QUERY_FORMAT, vocabulary::QUERY_FORMATS),
            key_layout: self.name(&key::KEY_LAYOUT, vocabulary::KEY_LAYOUTS),
            alignment: self.text(&key::ALIGNMENT, dims::power_of_two),
            padded_values: self.arguments.flag(&key::PADDED_VALUES).unwrap_or(false),
            graphs: self.name(&key::GRAPHS, vocabulary::GRAPHS),
            plans_on_host: self.arguments.flag(&key::PLANS_ON_HOST).unwrap_or(false),
            lse: self.name(&key::LSE, vocabulary::LSES),
            lse_precision: self.name(&key::LSE_PRECISION, vocabulary::LSE_PRECISIONS),
            quant_output: self.arguments.flag(&key::QUANT_OUTPUT).unwrap_or(false),
            sparse: self.name(&key::SPARSE, vocabulary::SPARSE),
            max_list_width: self.text(&key::MAX_LIST_WIDTH, dims::any_or_positive),
            features: match self.arguments.text(&key::FEATURES) {
                Some(_) => self.names(&key::FEATURES, vocabulary::FEATURES),
                None => Vec::new(),
            },
            priority: self.text(&key::PRIORITY, priority::parse),
        }
    }

    // An unquantised cache holds the dtype, under the dtype's own name and variant.
    fn kv(&mut self, dtypes: &[Name]) -> Vec<Name> {
        match self.arguments.text(&key::KV) {
            Some(_) => self.names(&key::KV, vocabulary::KV_FORMATS),
            None => dtypes.to_vec(),
        }
    }

    fn contradictions(&mut self, spec: &Spec) {
        for Contradiction { key, beside, fault } in contradiction::find(spec) {
            if self.reads_well(&key) && self.reads_well(&beside) {
                self.errors
                    .fault(self.arguments.span(&key), key.name, fault);
            }
        }
    }

    fn reads_well(&self, key: &Key) -> bool {
        !self.faulty.contains(key) && self.arguments.reads_well(key)
    }

    /// What `parse` makes of the key's text or of its default. A key that must be given and was not
    /// is an error already: then its example takes its place.
    fn text<T>(&mut self, key: &Key, parse: impl FnOnce(&str, &mut Vec<Fault>) -> T) -> T {
        let example = key.example.trim_matches('"');
        self.text_or(key, key.default.unwrap_or(example), parse)
    }

    fn text_or<T>(
        &mut self,
        key: &Key,
        default: &str,
        parse: impl FnOnce(&str, &mut Vec<Fault>) -> T,
    ) -> T {
        let mut faults = Vec::new();
        let value = parse(self.arguments.text(key).unwrap_or(default), &mut faults);
        if !faults.is_empty() {
            self.faulty.push(*key);
        }
        for fault in faults {
            self.errors.fault(self.arguments.span(key), key.name, fault);
        }
        value
    }

    fn names(&mut self, key: &Key, names: &[Name]) -> Vec<Name> {
        self.text(key, |text, faults| {
            list::distinct(text, key.accepted, faults, |element| {
                list::name(element, names, key.accepted)
            })
        })
    }

    fn name(&mut self, key: &Key, names: &[Name]) -> Name {
        self.text(key, |text, faults| {
            list::only(text, names, key.accepted, faults)
        })
    }
}

fn name(text: &str, faults: &mut Vec<Fault>) -> String {
    if !is_upper_snake(text) {
        let meant = text.to_shouty_snake_case();
        let meant = is_upper_snake(&meant).then_some(meant);
        faults.push(Fault::new(quoted(text), key::NAME.accepted).meant(meant));
    }
    text.to_owned()
}

fn is_upper_snake(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_uppercase())
        && text.split('_').all(|word| {
            !word.is_empty()
                && word
                    .bytes()
                    .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
        })
}

fn feature(text: &str, faults: &mut Vec<Fault>) -> Vec<String> {
    let accepted = key::FEATURE.accepted;
    list::distinct(text, accepted, faults, |element| {
        let fits = |c: char| c.is_alphanumeric() || "-_+.".contains(c);
        if !element.text.is_empty() && element.text.chars().all(fits) {
            Ok(element.text.to_owned())
        } else {
            Err(element.fault(accepted))
        }
    })
}

/// Whether `text` is a value that `key` takes, so that a hint does not recommend an error.
pub(crate) fn accepts(key: &Key, text: &str) -> bool {
    let mut faults = Vec::new();
    let names = |names: &[Name], faults: &mut Vec<Fault>| {
        list::distinct(text, key.accepted, faults, |element| {
            list::name(element, names, key.accepted)
        });
    };
    match *key {
        key::SM => drop(capability::sm(text, &mut faults)),
        key::DTYPES => names(vocabulary::DTYPES, &mut faults),
        key::DIMS => drop(dims::head(text, &mut faults)),
        key::CACHE_DIMS => drop(dims::cache(text, &mut faults)),
        key::HEADS => drop(dims::heads(text, &mut faults)),
        key::KV => names(vocabulary::KV_FORMATS, &mut faults),
        key::PAGE_SIZES => drop(dims::page_sizes(text, &mut faults)),
        key::QUERY_LEN => drop(list::only(text, vocabulary::QUERY_LENS, "", &mut faults)),
        key::MAX_QUERY_LEN | key::MAX_LIST_WIDTH => {
            dims::any_or_positive(text, &mut faults);
        }
        key::ALIGNMENT => drop(dims::power_of_two(text, &mut faults)),
        key::QUERY_FORMAT => drop(list::only(text, vocabulary::QUERY_FORMATS, "", &mut faults)),
        key::KEY_LAYOUT => drop(list::only(text, vocabulary::KEY_LAYOUTS, "", &mut faults)),
        key::GRAPHS => drop(list::only(text, vocabulary::GRAPHS, "", &mut faults)),
        key::LSE => drop(list::only(text, vocabulary::LSES, "", &mut faults)),
        key::LSE_PRECISION => drop(list::only(
            text,
            vocabulary::LSE_PRECISIONS,
            "",
            &mut faults,
        )),
        key::SPARSE => drop(list::only(text, vocabulary::SPARSE, "", &mut faults)),
        key::FEATURES => names(vocabulary::FEATURES, &mut faults),
        key::FEATURE => drop(feature(text, &mut faults)),
        key::NAME => drop(name(text, &mut faults)),
        key::PROVIDER => drop(provider(text, &mut faults)),
        key::PRIORITY => drop(priority::parse(text, &mut faults)),
        _ => return false,
    }
    faults.is_empty()
}

fn provider(text: &str, faults: &mut Vec<Fault>) -> String {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.is_empty() || !text.bytes().all(fits) {
        faults.push(Fault::new(quoted(text), key::PROVIDER.accepted));
    }
    text.to_owned()
}
