//! The `#[mla_backend]` attribute.
//!
//! Use it as `mla_runtime::mla_backend`: its expansion names all items through that crate.

mod arguments;
mod capability;
mod cargo;
mod contradiction;
mod dims;
mod errors;
mod expansion;
#[cfg(test)]
mod golden;
mod key;
mod list;
mod number;
mod place;
mod priority;
#[cfg(test)]
mod properties;
mod reader;
mod spec;
mod synonym;
mod table;
mod value;
mod vocabulary;

/// Makes a backend from an `impl PrefillBackend for T` or `impl DecodeBackend for T` block.
///
/// ```text
/// #[mla_backend(sm = "90|100", dtypes = "f16,bf16", requires_r1 = true)]
/// impl PrefillBackend for MyAttention { … }
/// ```
///
/// The attribute writes the block's `const SPEC`, which the compiler checks. It adds an entry to
/// the registry of every program that links the crate. It also adds a table of the supported
/// problems to the block's documentation.
///
#[doc = include_str!("../keys.md")]
///
/// `|` or `,` separates the elements of a list; spaces around them do not matter. A single number
/// needs no quotes. All errors are reported at once.
///
/// # What it writes
///
/// For the use above on a block that only names its device, the expansion is:
///
/// ```text
#[doc = include_str!("../expansions/literal.rs")]
/// ```
#[proc_macro_attribute]
pub fn mla_backend(
    arguments: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    expansion::expand(arguments.into(), item.into()).into()
}

/// The names of the cache formats that the attribute knows. The runtime compares them with its own.
#[doc(hidden)]
#[proc_macro]
pub fn kv_formats(_: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let names = vocabulary::KV_FORMATS.iter().map(|name| name.text);
    quote::quote!(&[#(#names),*]).into()
}
