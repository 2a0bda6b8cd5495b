//! The `#[mla_backend]` attribute.
