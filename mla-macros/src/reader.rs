//! Reads a spec from the arguments: each key's value or default, and the faults of these.

use syn::spanned::Spanned;

use crate::arguments::Arguments;
use crate::capability;
use crate::cargo;
use crate::contradiction::{self, Contradiction};
use crate::dims;
use crate::errors::{Errors, Fault, quoted};
use crate::key::{self, KEYS, Key};
use crate::list;
use crate::place::{Phase, Place, compact};
use crate::priority;
use crate::spec::Spec;
use crate::value;
use crate::vocabulary::{self, Name};

/// (P, R, V) of DeepSeek-R1.
const R1: [u32; 3] = [128, 64, 128];

/// Reads every key, and reports the faults of each value and of combinations. A missing place is
/// already an error; then only the keys themselves are checked.
pub(crate) fn read(arguments: &Arguments, place: Option<&Place>, errors: &mut Errors) -> Spec {
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
        if arguments.misses(&key::NAME) && !place.generic {
            spec.name = default_name(place, errors);
        }
    }
    spec
}

// Reports keys that are missing, that the phase does not have, or that exclude each other.
fn check_presence(arguments: &Arguments, phase: Option<Phase>, errors: &mut Errors) {
    let mut report = |key: &Key, given: &str, accepted: &str, hint: &str| {
        let fault = Fault::new(given, accepted).hint(hint);
        errors.fault(arguments.span(key), key.name, fault);
    };
    for key in KEYS {
        if key.default.is_none() && arguments.misses(key) {
            let hint = format!("write `{} = {}`", key.name, key.example);
            report(key, "none", key.accepted, &hint);
        }
        let other = phase.filter(|phase| key.only.is_some_and(|only| only != *phase));
        if let Some(phase) = other.filter(|_| arguments.has(key)) {
            let hint = match phase {
                Phase::Prefill => "only a decode backend reads the cache: remove the key",
                Phase::Decode => {
                    "only a prefill backend has keys and values of its own: remove the key"
                }
            };
            report(
                key,
                &format!("a value on `impl {}`", phase.backend()),
                "none",
                hint,
            );
        }
    }
    // `sm = "compiled"` always needs the targets that another key lists.
    if arguments
        .text(&key::SM)
        .is_some_and(capability::is_compiled)
    {
        if arguments.misses(&key::COMPILED) {
            let hint = format!("add `{} = {}`", key::COMPILED.name, key::COMPILED.example);
            report(
                &key::SM,
                "`compiled` without the key `compiled`",
                "both",
                &hint,
            );
        }
        if arguments.has(&key::FEATURE) {
            let hint =
                "with the feature off nothing is compiled, and the spec says the same all the same";
            report(
                &key::SM,
                "`compiled` beside `feature`",
                "capabilities",
                hint,
            );
        }
    }
    if arguments.text(&key::LSE) == Some("none") && arguments.has(&key::LSE_PRECISION) {
        let hint = "a kernel that writes no log-sum-exp has none to be exact: leave it out";
        report(
            &key::LSE_PRECISION,
            "a value beside `lse = \"none\"`",
            "none",
            hint,
        );
    }
    if arguments.has(&key::REQUIRES_R1) && arguments.has(&key::DIMS) {
        let hint = "`requires_r1 = true` is short for `dims = \"(128,64,128)\"`";
        report(
            &key::REQUIRES_R1,
            "a value beside `dims`",
            "one of the two",
            hint,
        );
    }
}

fn default_name(place: &Place, errors: &mut Errors) -> String {
    let of_type = |name: &str| format!("none, and the type's name gives {}", quoted(name));
    let given = match place.default_name() {
        Some(name) if value::reserved(&name).is_some() => {
            of_type(&name) + ", which stands for backends of any name"
        }
        Some(name) if value::is_upper_snake(&name) => return name,
        Some(name) => of_type(&name),
        None => {
            let given = compact(&place.self_type);
            format!("none, and `{given}` is not the name of one type")
        }
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
    // Keys whose values were reported. Contradictions with these values are not reported.
    faulty: Vec<Key>,
}

impl Reader<'_> {
    fn spec(&mut self, phase: Phase) -> Spec {
        let decode = phase == Phase::Decode;
        let dtypes = self.names(&key::DTYPES);
        let kv = self.kv(&dtypes);
        let dims = self.text(&key::DIMS, dims::head);
        let query_len = self.name(&key::QUERY_LEN);
        Spec {
            name: self.text_or(&key::NAME, "UNNAMED", value::name),
            provider: (self.arguments.has(&key::PROVIDER))
                .then(|| self.text(&key::PROVIDER, value::provider)),
            phase,
            sm: self.text(&key::SM, capability::sm),
            compiled: self.arguments.paths(&key::COMPILED).to_vec(),
            features_of_cargo: match self.arguments.text(&key::FEATURE) {
                Some(_) => self.features_of_cargo(),
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
            query_format: self.name(&key::QUERY_FORMAT),
            key_layout: self.name(&key::KEY_LAYOUT),
            alignment: self.text(&key::ALIGNMENT, dims::power_of_two),
            graphs: self.name(&key::GRAPHS),
            plans_on_host: self.arguments.flag(&key::PLANS_ON_HOST).unwrap_or(false),
            dependent_launch: (self.arguments.flag(&key::DEPENDENT_LAUNCH)).unwrap_or(false),
            lse: self.name(&key::LSE),
            lse_precision: self.name(&key::LSE_PRECISION),
            quant_output: self.arguments.flag(&key::QUANT_OUTPUT).unwrap_or(false),
            sparse: self.name(&key::SPARSE),
            max_list_width: self.text(&key::MAX_LIST_WIDTH, dims::any_or_positive),
            features: self.text(&key::FEATURES, |text, faults| {
                list::none_or_names(text, &key::FEATURES, faults)
            }),
            priority: self.text(&key::PRIORITY, priority::parse),
        }
    }

    // Checks that the package has the features. Cargo never turns on a feature that the package
    // lacks, so the backend would be absent from every build.
    fn features_of_cargo(&mut self) -> Vec<String> {
        let mut features = self.text(&key::FEATURE, value::feature);
        let (declared, span) = (cargo::features(), self.arguments.span(&key::FEATURE));
        features.retain(|feature| {
            let fault = value::undeclared(feature, &declared);
            fault
                .map(|fault| self.errors.fault(span, key::FEATURE.name, fault))
                .is_none()
        });
        features
    }

    // An unquantised cache has the dtype of the queries, and the same name and variant.
    fn kv(&mut self, dtypes: &[Name]) -> Vec<Name> {
        match self.arguments.text(&key::KV) {
            Some(_) => self.names(&key::KV),
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

    /// Applies `parse` to the key's text or to its default. If a required key is missing, that is
    /// already an error. Its example is then used instead.
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
        let Some(text) = self.arguments.text(key) else {
            return parse(default, &mut faults);
        };
        let value = parse(text, &mut faults);
        if !faults.is_empty() {
            self.faulty.push(*key);
        }
        for fault in faults {
            let fault = value::explained(key, text, fault);
            self.errors.fault(self.arguments.span(key), key.name, fault);
        }
        value
    }

    fn names(&mut self, key: &Key) -> Vec<Name> {
        self.text(key, |text, faults| list::names(text, key, faults))
    }

    fn name(&mut self, key: &Key) -> Name {
        self.text(key, |text, faults| list::only(text, key, faults))
    }
}
