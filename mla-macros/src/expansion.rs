//! The code that the attribute writes.

use proc_macro2::{Group, Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::Attribute;
use syn::spanned::Spanned;

use crate::arguments::Arguments;
use crate::capability::Capabilities;
use crate::cargo;
use crate::dims::{Heads, PageSizes};
use crate::errors::Errors;
use crate::key;
use crate::place::Place;
use crate::reader;
use crate::spec::Spec;
use crate::table;
use crate::vocabulary::Name;

/// Expands the attribute with these arguments on this item.
pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let arguments = Arguments::parse(arguments, &mut errors);
    let place = Place::parse(item, &mut errors);
    let spec = reader::read(&arguments, place.as_ref().ok(), &mut errors);
    let place = match place {
        Ok(place) => place,
        Err(item) => {
            let errors = errors.to_tokens();
            return quote! { #item #errors };
        }
    };
    place.check_body(&mut errors);

    // The path of the runtime crate. The expansion names all items of that crate by it.
    let path = &match arguments.path(&key::CRATE) {
        Some(path) => path.to_token_stream(),
        None => quote!(::mla_runtime),
    };
    let gate = gate(&spec, &arguments);
    // The condition for the code of a backend whose feature is on.
    let on = gate.as_ref().map(|any| quote!(#[cfg(#any)]));
    if errors.is_empty() {
        let block = block(path, &place, &spec);
        let link = link(path, &place, &spec, &arguments);
        let absent = gate.map(|any| absent(path, &place, &spec, &quote!(#[cfg(not(#any))])));
        let claim = claim(&place, &spec);
        quote! { #on #block #on #link #absent #claim }
    } else {
        let block = (!place.generic).then(|| block_without_spec(path, &place));
        let errors = errors.to_tokens();
        quote! { #on #block #errors }
    }
}

/// The condition that one of the Cargo features is on, if the key names any.
fn gate(spec: &Spec, arguments: &Arguments) -> Option<TokenStream> {
    // The span is the author's own. The compiler's lint on unknown features then points at the
    // value.
    let span = arguments.span(&key::FEATURE);
    let features = spec.features_of_cargo.iter().map(|name| {
        let name = Literal::string(name);
        quote_spanned!(span=> feature = #name)
    });
    match spec.features_of_cargo.len() {
        0 => None,
        1 => Some(quote!(#(#features)*)),
        _ => Some(quote!(any(#(#features),*))),
    }
}

/// The block with its constants and its documentation.
fn block(path: &TokenStream, place: &Place, spec: &Spec) -> TokenStream {
    let spec_value = spec_tokens(path, spec, &platform(path, place));
    let kernels = kernels(path, spec, true);
    let spec_value = quote!(const SPEC: #path::spec::BackendSpec = #spec_value;);
    block_with(place, &spec_value, kernels, &documentation(spec))
}

/// The block with a placeholder for its spec. The compiler then does not report the same fault
/// again as a missing constant, but still reports other faults in the block.
fn block_without_spec(path: &TokenStream, place: &Place) -> TokenStream {
    let Some(condition) = place.misses_spec() else {
        let (attributes, head, body) = (&place.attributes, &place.head, &place.body);
        return quote! { #(#attributes)* #head #body };
    };
    let phase = variant(place.phase.variant());
    let platform = platform(path, place);
    let spec = quote! {
        #condition
        const SPEC: #path::spec::BackendSpec =
            #path::spec::BackendSpec::new("", #path::spec::Phase::#phase, #platform);
    };
    block_with(place, &spec, None, &TokenStream::new())
}

// The constants come last, after any inner attributes and after the author's lines.
fn block_with(
    place: &Place,
    spec: &TokenStream,
    kernels: Option<TokenStream>,
    doc: &TokenStream,
) -> TokenStream {
    let (attributes, head) = (&place.attributes, &place.head);
    let items = place.body.stream();
    let mut body = Group::new(
        place.body.delimiter(),
        quote! {
            #items
            #spec
            #kernels
        },
    );
    body.set_span(place.body.span());
    quote! { #(#attributes)* #doc #head #body }
}

fn platform(path: &TokenStream, place: &Place) -> TokenStream {
    let backend = variant(place.phase.backend());
    quote!(<<Self as #path::backend::#backend>::Device as #path::device::Device>::PLATFORM)
}

/// The constant with the facts of the kernels, if any are known: their compiled targets, and
/// the GPUs that they ran on. A backend that a build leaves out has no compiled targets.
fn kernels(path: &TokenStream, spec: &Spec, present: bool) -> Option<TokenStream> {
    if !(present && runs_on_gpus(spec)) && spec.run_on.is_none() {
        return None;
    }
    let families = match present && runs_on_gpus(spec) {
        false => option(None::<TokenStream>),
        true if spec.compiled.is_empty() => {
            let features = &spec.features_of_cargo;
            quote!(#path::private::families!(#(#features),*))
        }
        true => option(Some(families(path, spec))),
    };
    let run_on = option(spec.run_on.as_ref());
    Some(quote! {
        const KERNELS: #path::spec::KernelFacts = #path::spec::KernelFacts {
            families: #families,
            run_on: #run_on,
        };
    })
}

fn families(path: &TokenStream, spec: &Spec) -> TokenStream {
    let declared = cargo::features();
    let families = spec.compiled.iter().map(|targets| {
        let last = targets.segments.last().map(|it| it.ident.to_string());
        let name = cargo::family(last.unwrap_or_default(), &declared);
        quote!(#path::spec::CompiledFamily { name: #name, targets: #targets })
    });
    quote!(&[#(#families),*])
}

/// The registry entry, and the checks that only the compiler can make.
fn link(path: &TokenStream, place: &Place, spec: &Spec, arguments: &Arguments) -> TokenStream {
    let backend = variant(place.phase.backend());
    let self_type = &place.self_type;
    let this = quote!(<#self_type as #path::backend::#backend>);
    // Conditions of the block also apply to its entry: `#[cfg(…)]` may follow the attribute.
    let cfgs = cfgs(place);
    // The span is at the key, but marks the code as written by the macro.
    let span = Span::call_site().located_at(arguments.span(&key::SM));
    let platform = platform_fault(spec).map(|(refused, message)| {
        quote_spanned! {span=>
            const _: () = if let #path::spec::Platform::#refused =
                <#this::Device as #path::device::Device>::PLATFORM
            {
                ::core::panic!(#message)
            };
        }
    });
    let fault = match &spec.compiled[..] {
        _ if !runs_on_gpus(spec) => None,
        // It is no error if no build compiles a declared capability: the package may be another
        // author's. The capability is then a reason against the backend.
        [] => {
            let features = &spec.features_of_cargo;
            Some(quote!(#path::private::build!(#(#features),*).fault()))
        }
        // With `sm = "compiled"`, the compiled targets are the declared capabilities.
        _ if spec.sm.is_none() => None,
        _ => Some(quote!(#this::KERNELS.fault(#this::SPEC.capabilities))),
    };
    let compiled = fault.map(|fault| {
        quote_spanned! {span=>
            const _: () = if let ::core::option::Option::Some(fault) = #fault {
                ::core::panic!("{}", fault.as_str())
            };
        }
    });
    let entry = entry(path, &quote!(#this::ENTRY));
    let found = found(path, arguments);
    quote! {
        #(#cfgs)*
        const _: () = {
            #found
            const _: #path::spec::BackendSpec = #this::SPEC;
            #platform
            #compiled
            #entry
        };
    }
}

/// Writes an item whose error names the key `crate` if the path leads nowhere or to another
/// crate. For an import with an unknown first name, the compiler shows no other name of the
/// import. It does show the name of the macro that contains the import.
fn found(path: &TokenStream, arguments: &Arguments) -> TokenStream {
    // If the key is not written, this is the span of the attribute.
    let span = Span::call_site().located_at(arguments.span(&key::CRATE));
    quote_spanned! {span=>
        macro_rules! the_key_crate_has_to_name_mla_runtime {
            () => {
                use #path::the_key_crate_has_to_name_mla_runtime as runtime;
                const _: () = runtime::FOUND;
            };
        }
        the_key_crate_has_to_name_mla_runtime! {}
    }
}

fn entry(path: &TokenStream, entry: &TokenStream) -> TokenStream {
    quote!(#path::private::link! { #entry })
}

// The platform that the device must not have, and the message if it has it.
fn platform_fault(spec: &Spec) -> Option<(Ident, String)> {
    let sets = match &spec.sm {
        None => "`compiled`".to_owned(),
        Some(sets) if *sets != [Capabilities::Any] => {
            let sets: Vec<_> = sets.iter().map(|set| format!("`{set}`")).collect();
            sets.join(", ")
        }
        // If the feature is off, only `sm` tells the kind of device.
        Some(_) if !spec.features_of_cargo.is_empty() => {
            let message = "sm: given `any` beside `feature`, accepted capabilities, such as \
                           `80+`: the device is a GPU, which nothing else says with the \
                           feature off";
            return Some((variant("Cuda"), message.to_owned()));
        }
        Some(_) => return None,
    };
    let message = format!(
        "sm: given {sets}, accepted `any`: the device is a processor, which has no compute \
         capability"
    );
    Some((variant("Cpu"), message))
}

/// Writes the code that replaces a backend that is left out: the same spec, and the reason.
fn absent(path: &TokenStream, place: &Place, spec: &Spec, off: &TokenStream) -> TokenStream {
    let (attributes, self_type) = (&place.attributes, &place.self_type);
    let cfgs = cfgs(place);
    let phase = variant(place.phase.variant());
    let [member, arm] = ["Member", "Arm"].map(|it| variant(&format!("{phase}{it}")));
    let platform = match &spec.sm {
        Some(sets) if *sets == [Capabilities::Any] => variant("Cpu"),
        _ => variant("Cuda"),
    };
    let spec_value = spec_tokens(path, spec, &quote!(#path::spec::Platform::#platform));
    let kernels = kernels(path, spec, false);
    let doc = documentation(spec);
    let feature = spec.features_of_cargo.first();
    let entry = entry(
        path,
        &quote!(<#self_type as #path::dispatch::Absent>::ENTRY),
    );
    quote! {
        #off
        #(#attributes)*
        #doc
        impl #path::dispatch::Absent for #self_type {
            const SPEC: #path::spec::BackendSpec = #spec_value;
            const CAUSE: #path::spec::Cause =
                #path::spec::Cause::FeatureOff {
                    package: ::core::env!("CARGO_PKG_NAME"),
                    feature: #feature,
                };
            #kernels
        }
        #off
        #(#cfgs)*
        const _: () = {
            impl #path::dispatch::#member for #self_type {
                const MEMBER: #path::dispatch::Member =
                    #path::dispatch::Member::absent::<Self>(#path::spec::Phase::#phase);
            }
            impl<D: #path::device::Device> #path::dispatch::#arm<D> for #self_type {}
            #entry
        };
    }
}

/// The spec as an expression. Each field is set by a method, because the struct may get further
/// fields.
fn spec_tokens(path: &TokenStream, spec: &Spec, platform: &TokenStream) -> TokenStream {
    let (name, provider) = (&spec.name, provider(spec));
    let phase = variant(spec.phase.variant());
    let (capabilities, priority) = (all_capabilities(path, spec), priority(path, spec));
    let dtypes = variants(path, &quote!(model::DType), &spec.dtypes);
    let kv_formats = variants(path, &quote!(model::KvFormat), &spec.kv);
    let features = variants(path, &quote!(spec::Feature), &spec.features);
    let dims = list_or_none(spec.dims.as_deref(), |dims| {
        let dims = numbers(dims);
        quote!(#path::model::HeadDims::new(#dims))
    });
    let cache_dims = list_or_none(spec.cache_dims.as_deref(), |dims| {
        let dims = numbers(dims);
        quote!(#path::spec::CacheDims::new(#dims))
    });
    let list = |list: &[u32]| {
        let list = numbers(list);
        quote!(List(&[#list]))
    };
    let heads = match &spec.heads {
        Heads::Any => quote!(Any),
        Heads::Range(min, max) => {
            let ends = numbers(&[*min, *max]);
            quote!(Range(#ends))
        }
        Heads::List(counts) => list(counts),
    };
    let page_sizes = match &spec.page_sizes {
        PageSizes::Any => quote!(Any),
        PageSizes::MultipleOf(unit) => {
            let unit = Literal::u32_unsuffixed(*unit);
            quote!(MultipleOf(#unit))
        }
        PageSizes::List(sizes) => list(sizes),
    };
    let max = |max: Option<u32>| option(max.map(Literal::u32_unsuffixed));
    let (max_query_len, max_list_width) = (max(spec.max_query_len), max(spec.max_list_width));
    let alignment = Literal::u32_unsuffixed(spec.alignment);
    let [
        query_len,
        query_format,
        key_layout,
        graphs,
        lse,
        lse_precision,
        sparse,
    ] = [
        spec.query_len,
        spec.query_format,
        spec.key_layout,
        spec.graphs,
        spec.lse,
        spec.lse_precision,
        spec.sparse,
    ]
    .map(|name| variant(name.variant));
    let (plans_on_host, dependent_launch) = (spec.plans_on_host, spec.dependent_launch);
    let quant_output = spec.quant_output;
    quote! {
        #path::spec::BackendSpec::new(#name, #path::spec::Phase::#phase, #platform)
        .with_provider(#provider)
        .with_capabilities(#capabilities)
        .with_dtypes(#dtypes)
        .with_dims(#dims)
        .with_cache_dims(#cache_dims)
        .with_heads(#path::spec::HeadCounts::#heads)
        .with_kv_formats(#kv_formats)
        .with_page_sizes(#path::spec::PageSizes::#page_sizes)
        .with_query_len(#path::spec::QueryLen::#query_len)
        .with_max_query_len(#max_query_len)
        .with_query_format(#path::spec::QueryFormat::#query_format)
        .with_key_layout(#path::spec::KeyLayout::#key_layout)
        .with_alignment(#alignment)
        .with_graphs(#path::spec::GraphSupport::#graphs)
        .with_plans_on_host(#plans_on_host)
        .with_dependent_launch(#dependent_launch)
        .with_lse(#path::spec::LseOutput::#lse)
        .with_lse_precision(#path::spec::LsePrecision::#lse_precision)
        .with_quant_output(#quant_output)
        .with_sparse(#path::spec::SparseSupport::#sparse)
        .with_max_list_width(#max_list_width)
        .with_features(#path::spec::FeatureSet::of(#features))
        .with_priority(#priority)
        .checked()
    }
}

/// The capabilities of `sm`, or those of the targets that its families are compiled for.
fn all_capabilities(path: &TokenStream, spec: &Spec) -> TokenStream {
    match &spec.sm {
        Some(sets) => {
            let sets = sets.iter().map(|set| capabilities(path, *set));
            quote!(&[#(#sets),*])
        }
        None => {
            let families = families(path, spec);
            quote! {{
                const FAMILIES: &[#path::spec::CompiledFamily] = #families;
                const SETS:
                    [#path::spec::CapabilityMatch; #path::spec::count(FAMILIES)] =
                    #path::spec::capabilities(FAMILIES);
                &SETS
            }}
        }
    }
}

fn priority(path: &TokenStream, spec: &Spec) -> TokenStream {
    let by_capability = spec.priority.by_capability.iter().map(|(set, priority)| {
        let set = capabilities(path, *set);
        let priority = Literal::i32_unsuffixed(*priority);
        quote!((#set, #priority))
    });
    let otherwise = Literal::i32_unsuffixed(spec.priority.otherwise.unwrap_or(0));
    quote! {
        #path::spec::Priority {
            by_capability: &[#(#by_capability),*],
            otherwise: #otherwise,
        }
    }
}

fn capabilities(path: &TokenStream, set: Capabilities) -> TokenStream {
    let (kind, capability) = match set {
        Capabilities::Any => return quote!(#path::spec::CapabilityMatch::Any),
        Capabilities::Family(major) => {
            let major = Literal::u8_unsuffixed(major);
            return quote!(#path::spec::CapabilityMatch::Family(#major));
        }
        Capabilities::Exact(only) => (variant("Exact"), only),
        Capabilities::Floor(min) => (variant("Floor"), min),
    };
    let numbers = [capability.major, capability.minor].map(Literal::u8_unsuffixed);
    quote! {
        #path::spec::CapabilityMatch::#kind(#path::spec::Capability::new(#(#numbers),*))
    }
}

// Writes a slice of variants of the runtime's enum `of`.
fn variants(path: &TokenStream, of: &TokenStream, names: &[Name]) -> TokenStream {
    let variants = names.iter().map(|name| variant(name.variant));
    quote!(&[#(#path::#of::#variants),*])
}

// Writes `Some` of a slice, or `None`.
fn list_or_none<T>(list: Option<&[T]>, tokens: impl Fn(&T) -> TokenStream) -> TokenStream {
    option(list.map(|list| {
        let items = list.iter().map(tokens);
        quote!(&[#(#items),*])
    }))
}

fn numbers(numbers: &[u32]) -> TokenStream {
    let numbers = numbers.iter().copied().map(Literal::u32_unsuffixed);
    quote!(#(#numbers),*)
}

fn option(value: Option<impl ToTokens>) -> TokenStream {
    match value {
        Some(value) => quote!(::core::option::Option::Some(#value)),
        None => quote!(::core::option::Option::None),
    }
}

fn variant(name: &str) -> Ident {
    Ident::new(name, Span::call_site())
}

fn cfgs(place: &Place) -> impl Iterator<Item = &Attribute> {
    place.attributes.iter().filter(|it| is_cfg(it))
}

// Writes a macro at the crate's root that is named after the backend. If two backends of a crate
// have one name, their macros clash, whatever modules they are in. The compiler's error then shows
// both types, and the macro's name says what to do. The registry reports clashes between two
// crates.
fn claim(place: &Place, spec: &Spec) -> TokenStream {
    let phase = place.phase.variant().to_lowercase();
    let name = format!("a_second_{phase}_backend_{}_needs_the_key_name", spec.name);
    let name = Ident::new(&name, Span::call_site().located_at(place.self_type.span()));
    let cfgs = cfgs(place);
    quote_spanned! {name.span()=>
        #(#cfgs)*
        #[doc(hidden)]
        #[allow(non_local_definitions)]
        #[macro_export]
        macro_rules! #name {
            () => {};
        }
    }
}

fn runs_on_gpus(spec: &Spec) -> bool {
    !matches!(spec.sm.as_deref(), Some([Capabilities::Any]))
}

// The default is the name of the package that is being compiled. Only the compiler knows it.
fn provider(spec: &Spec) -> TokenStream {
    match &spec.provider {
        Some(provider) => quote!(#provider),
        None => quote!(::core::env!("CARGO_PKG_NAME")),
    }
}

fn documentation(spec: &Spec) -> TokenStream {
    let [head, rows] = table::markdown(spec);
    match &spec.provider {
        Some(provider) => {
            let table = format!("{head}\n| provider | {provider} |\n{rows}");
            quote!(#[doc = #table])
        }
        None => {
            let provider = provider(spec);
            quote! {
                #[doc = #head]
                #[doc = ::core::concat!("| provider | ", #provider, " |")]
                #[doc = #rows]
            }
        }
    }
}

fn is_cfg(attribute: &Attribute) -> bool {
    attribute.path().is_ident("cfg")
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    fn check(golden: &str, arguments: TokenStream, item: TokenStream) {
        let tokens = expand(arguments, item);
        let file = syn::parse2(tokens).expect("the expansion is Rust");
        crate::golden::check(
            &format!("expansions/{golden}.rs"),
            &prettyplease::unparse(&file),
        );
    }

    #[test]
    fn the_literal_form() {
        check(
            "literal",
            quote!(sm = "90|100", dtypes = "f16,bf16", requires_r1 = true),
            quote! {
                impl PrefillBackend for FlashAttn {
                    type Device = Cuda;
                }
            },
        );
    }

    #[test]
    fn every_key() {
        check(
            "every_key",
            quote!(
                sm = "90|10x|120+",
                dtypes = "f16|bf16",
                dims = "(128,64,128)|(192,64,256)",
                cache_dims = "(512,64)",
                heads = "1..=128",
                kv = "f16,bf16,fp8,fp8_ds_mla",
                page_sizes = "x16",
                query_len = "ragged",
                max_query_len = 8,
                query_format = "concatenated",
                alignment = 16,
                graphs = "always",
                plans_on_host = true,
                dependent_launch = true,
                lse = "log2",
                lse_precision = "dtype",
                quant_output = true,
                sparse = "optional",
                max_list_width = 8192,
                features = "sinks,deterministic",
                name = "EVERY_KEY",
                provider = "elsewhere",
                compiled = "raw::SM90|raw::SM80",
                run_on = RUN_ON,
                priority = "90:100,10x:-50,*:7",
                crate = crate::engine::mla_runtime,
            ),
            quote! {
                /// The author's description.
                #[cfg(feature = "flash")]
                impl mla_runtime::backend::DecodeBackend for inner::Flash {
                    #![allow(unused)]

                    type Device = Cuda;
                }
            },
        );
    }

    #[test]
    fn a_feature_that_compiles_it() {
        check(
            "feature",
            quote!(
                feature = "sm90",
                sm = "90",
                dtypes = "bf16",
                compiled = raw::SM90
            ),
            quote! {
                impl DecodeBackend for Flash {
                    type Device = Cuda;
                }
            },
        );
    }

    #[test]
    fn errors_leave_a_block_that_compiles() {
        check(
            "errors",
            quote!(sm = "90|9o", dtypes = "bf61"),
            quote! {
                impl DecodeBackend for Flash {
                    type Device = Cuda;
                }
            },
        );
    }
}
