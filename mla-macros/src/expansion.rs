//! What the attribute writes.

use proc_macro2::{Group, Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::Attribute;

use crate::arguments::Arguments;
use crate::capability::{Capabilities, Capability};
use crate::dims::{Heads, PageSizes};
use crate::errors::Errors;
use crate::key;
use crate::place::Place;
use crate::spec::Spec;
use crate::table;
use crate::vocabulary::Name;

/// The attribute with these arguments on this item.
pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let arguments = Arguments::parse(arguments, &mut errors);
    let place = Place::parse(item.clone(), &mut errors);
    let spec = Spec::read(&arguments, place.as_ref(), &mut errors);
    let Some(place) = place else {
        let errors = errors.to_tokens();
        return quote! { #item #errors };
    };
    place.check_body(&mut errors);

    let runtime = Runtime::new(&arguments);
    if errors.is_empty() {
        let block = runtime.block(&place, &spec);
        let link = runtime.link(&place, &spec, &arguments);
        quote! { #block #link }
    } else {
        let block = runtime.block_without_spec(&place);
        let errors = errors.to_tokens();
        quote! { #block #errors }
    }
}

/// The runtime crate's path, by which the expansion names everything of it.
struct Runtime {
    path: TokenStream,
}

impl Runtime {
    fn new(arguments: &Arguments) -> Self {
        Self {
            path: match arguments.path(&key::CRATE) {
                Some(path) => path.to_token_stream(),
                None => quote!(::mla_runtime),
            },
        }
    }

    /// The block with its constant and its documentation.
    fn block(&self, place: &Place, spec: &Spec) -> TokenStream {
        let spec_value = self.spec(place, spec);
        let table = table::markdown(spec);
        self.block_with(place, &spec_value, &quote!(#[doc = #table]))
    }

    /// The block with some spec, so that what was reported is not reported again as a missing
    /// constant, and what else is wrong in the block is seen as well.
    fn block_without_spec(&self, place: &Place) -> TokenStream {
        if place.has_spec() {
            let (attributes, head, body) = (&place.attributes, &place.head, &place.body);
            return quote! { #(#attributes)* #head #body };
        }
        let path = &self.path;
        let phase = variant(place.phase.variant());
        let platform = self.platform(place);
        let spec = quote! {
            #path::spec::BackendSpec::new("", #path::spec::Phase::#phase, #platform)
        };
        self.block_with(place, &spec, &TokenStream::new())
    }

    // The constant comes last, behind any inner attributes and out of the way of the author's lines.
    fn block_with(&self, place: &Place, spec: &TokenStream, doc: &TokenStream) -> TokenStream {
        let path = &self.path;
        let (attributes, head) = (&place.attributes, &place.head);
        let items = place.body.stream();
        let mut body = Group::new(
            place.body.delimiter(),
            quote! {
                #items
                const SPEC: #path::spec::BackendSpec = #spec;
            },
        );
        body.set_span(place.body.span());
        quote! { #(#attributes)* #doc #head #body }
    }

    fn platform(&self, place: &Place) -> TokenStream {
        let path = &self.path;
        let backend = variant(place.phase.backend());
        quote!(<<Self as #path::backend::#backend>::Device as #path::device::Device>::PLATFORM)
    }

    /// The registry entry, and what only the compiler can check.
    fn link(&self, place: &Place, spec: &Spec, arguments: &Arguments) -> TokenStream {
        let path = &self.path;
        let backend = variant(place.phase.backend());
        let self_type = &place.self_type;
        let this = quote!(<#self_type as #path::backend::#backend>);
        // What holds for the block holds for its entry: `#[cfg(…)]` may stand below the attribute.
        let cfgs = place
            .attributes
            .iter()
            .filter(|attribute| is_cfg(attribute));
        let processor = (spec.sm != [Capabilities::Any]).then(|| {
            let message = format!(
                "sm: given {}, accepted `any`: the device is a processor, which has no compute \
                 capability",
                spec.sm
                    .iter()
                    .map(|set| format!("`{set}`"))
                    .collect::<Vec<_>>()
                    .join(", ")
            );
            // At the key, but not as if the author had written it.
            let span = Span::call_site().located_at(arguments.span(&key::SM));
            quote_spanned! {span=>
                const _: () = if let #path::capability::Platform::Cpu =
                    <#this::Device as #path::device::Device>::PLATFORM
                {
                    ::core::panic!(#message)
                };
            }
        });
        quote! {
            #(#cfgs)*
            const _: () = {
                const _: #path::spec::BackendSpec = #this::SPEC;
                #processor
                #[cfg(not(miri))]
                #[#path::private::linkme::distributed_slice(#path::backend::LINKED)]
                #[linkme(crate = #path::private::linkme)]
                static ENTRY: #path::backend::Entry = #this::ENTRY;
            };
        }
    }

    /// The spec's value, each field written out.
    fn spec(&self, place: &Place, spec: &Spec) -> TokenStream {
        let path = &self.path;
        let (name, provider, quant_output) = (&spec.name, &spec.provider, spec.quant_output);
        let phase = variant(spec.phase.variant());
        let platform = self.platform(place);
        let capabilities = spec.sm.iter().map(|set| self.capabilities(*set));
        let dtypes = self.variants(&quote!(dtype::DType), &spec.dtypes);
        let dims = list_or_none(spec.dims.as_deref(), |dims| {
            let dims = dims.map(Literal::u32_unsuffixed);
            quote!(#path::dims::HeadDims::new(#(#dims),*))
        });
        let cache_dims = list_or_none(spec.cache_dims.as_deref(), |dims| {
            let dims = dims.map(Literal::u32_unsuffixed);
            quote!(#path::spec::CacheDims::new(#(#dims),*))
        });
        let heads = match &spec.heads {
            Heads::Any => quote!(Any),
            Heads::Range(least, most) => {
                let ends = [*least, *most].map(Literal::u32_unsuffixed);
                quote!(Range(#(#ends),*))
            }
            Heads::List(counts) => {
                let counts = counts.iter().copied().map(Literal::u32_unsuffixed);
                quote!(List(&[#(#counts),*]))
            }
        };
        let kv_formats = self.variants(&quote!(kv_format::KvFormat), &spec.kv);
        let page_sizes = match &spec.page_sizes {
            PageSizes::Any => quote!(Any),
            PageSizes::MultipleOf(unit) => {
                let unit = Literal::u32_unsuffixed(*unit);
                quote!(MultipleOf(#unit))
            }
            PageSizes::List(sizes) => {
                let sizes = sizes.iter().copied().map(Literal::u32_unsuffixed);
                quote!(List(&[#(#sizes),*]))
            }
        };
        let query_len = variant(spec.query_len.variant);
        let graphs = variant(spec.graphs.variant);
        let lse = variant(spec.lse.variant);
        let sparse = variant(spec.sparse.variant);
        let features = self.variants(&quote!(feature::Feature), &spec.features);
        let by_capability = spec.priority.by_capability.iter().map(|(set, priority)| {
            let set = self.capabilities(*set);
            let priority = Literal::i32_unsuffixed(*priority);
            quote!((#set, #priority))
        });
        let otherwise = Literal::i32_unsuffixed(spec.priority.otherwise.unwrap_or(0));
        quote! {
            #path::spec::BackendSpec {
                name: #name,
                provider: #provider,
                phase: #path::spec::Phase::#phase,
                platform: #platform,
                capabilities: &[#(#capabilities),*],
                dtypes: #dtypes,
                dims: #dims,
                cache_dims: #cache_dims,
                heads: #path::spec::HeadCounts::#heads,
                kv_formats: #kv_formats,
                page_sizes: #path::spec::PageSizes::#page_sizes,
                query_len: #path::spec::QueryLen::#query_len,
                graphs: #path::spec::GraphSupport::#graphs,
                lse: #path::spec::LseOutput::#lse,
                quant_output: #quant_output,
                sparse: #path::spec::SparseSupport::#sparse,
                features: #path::feature::FeatureSet::of(#features),
                priority: #path::spec::Priority {
                    by_capability: &[#(#by_capability),*],
                    otherwise: #otherwise,
                },
            }
            .checked()
        }
    }

    fn capabilities(&self, set: Capabilities) -> TokenStream {
        let path = &self.path;
        let capability = |capability: Capability| {
            let major = Literal::u8_unsuffixed(capability.major);
            let minor = Literal::u8_unsuffixed(capability.minor);
            quote!(#path::capability::Capability::new(#major, #minor))
        };
        let set = match set {
            Capabilities::Any => quote!(Any),
            Capabilities::Exact(only) => {
                let only = capability(only);
                quote!(Exact(#only))
            }
            Capabilities::Family(major) => {
                let major = Literal::u8_unsuffixed(major);
                quote!(Family(#major))
            }
            Capabilities::Floor(least) => {
                let least = capability(least);
                quote!(Floor(#least))
            }
        };
        quote!(#path::capability::CapabilityMatch::#set)
    }

    // A slice of variants of the enum at `of` in the runtime.
    fn variants(&self, of: &TokenStream, names: &[Name]) -> TokenStream {
        let path = &self.path;
        let variants = names.iter().map(|name| variant(name.variant));
        quote!(&[#(#path::#of::#variants),*])
    }
}

// `Some` of a slice, or `None`.
fn list_or_none<T: Copy>(list: Option<&[T]>, tokens: impl Fn(T) -> TokenStream) -> TokenStream {
    match list {
        None => quote!(::core::option::Option::None),
        Some(list) => {
            let items = list.iter().map(|item| tokens(*item));
            quote!(::core::option::Option::Some(&[#(#items),*]))
        }
    }
}

fn variant(name: &str) -> Ident {
    Ident::new(name, Span::call_site())
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
                graphs = "always",
                lse = "log2",
                quant_output = true,
                sparse = "optional",
                features = "sinks,deterministic",
                name = "EVERY_KEY",
                provider = "elsewhere",
                priority = "90:100,10x:-50,*:7",
                crate = crate::engine::mla_runtime,
            ),
            quote! {
                /// What the author says about it.
                #[cfg(feature = "flash")]
                impl mla_runtime::backend::DecodeBackend for inner::Flash {
                    #![allow(unused)]

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
