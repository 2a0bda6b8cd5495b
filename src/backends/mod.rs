//! The built-in backends, in a folder for each family of kernels.

#[cfg(any(not(feature = "sm90"), test))]
mod off;
#[cfg(feature = "sm90")]
pub mod sm90;

/// The built-in prefill backends, to [choose from](mla_runtime::dispatch). Those of an architecture that
/// this build leaves out are listed as absent, so that a refusal names the feature.
#[cfg(feature = "sm90")]
pub type PrefillBackends = mla_runtime::backends![sm90::FlashAttn];

/// The built-in decode backends, to [choose from](mla_runtime::dispatch). Those of an architecture that
/// this build leaves out are listed as absent, so that a refusal names the feature.
#[cfg(feature = "sm90")]
pub type DecodeBackends = mla_runtime::backends![sm90::FlashMla];

/// The built-in prefill backends, to [choose from](mla_runtime::dispatch): this build leaves them out,
/// and a refusal names the feature.
#[cfg(not(feature = "sm90"))]
pub type PrefillBackends = mla_runtime::dispatch::Without<off::NoFlashAttn, ()>;

/// The built-in decode backends, to [choose from](mla_runtime::dispatch): this build leaves them out,
/// and a refusal names the feature.
#[cfg(not(feature = "sm90"))]
pub type DecodeBackends = mla_runtime::dispatch::Without<off::NoFlashMla, ()>;
