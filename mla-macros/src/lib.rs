//! The `#[mla_backend]` attribute.
/// Makes a backend of an `impl` block.
#[proc_macro_attribute]
pub fn mla_backend(
    _: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    item
}
