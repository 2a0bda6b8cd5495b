// Where the attribute does not belong.

use mla_runtime::backend::{DecodeBackend, Entry, PrefillBackend};
use mla_runtime::capability::Platform;
use mla_runtime::mla_backend;
use mla_runtime::spec::{BackendSpec, Phase};

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

#[mla_backend(sm = "90", dtypes = "bf16")]
struct Struct;

#[mla_backend(sm = "90", dtypes = "bf16")]
pub(crate) enum Enum {}

#[mla_backend(sm = "90", dtypes = "bf16")]
fn function() {}

#[mla_backend(sm = "90", dtypes = "bf16")]
trait Trait {}

#[mla_backend(sm = "90", dtypes = "bf16")]
mod module {}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl Struct {}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl Trait for Struct {}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl mla_runtime::backend::DecodeBackends for Struct {}

struct Generic<T>(T);
struct Instance<T>(T);

#[mla_backend(sm = "90", dtypes = "bf16")]
impl<T: Send + Sync + 'static> DecodeBackend for Generic<T> {
    decode_body!(common::Bytes);
}

#[mla_backend(sm = "90", dtypes = "bf16")]
unsafe impl PrefillBackend for Struct {
    prefill_body!(common::Bytes);
}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl !DecodeBackend for Struct {}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for Instance<u8> {
    decode_body!(common::Bytes);
}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for &'static Struct {
    decode_body!(common::Bytes);
}

struct WithSpec;

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for WithSpec {
    decode_body!(common::Bytes);
    const SPEC: BackendSpec = BackendSpec::new("BY_HAND", Phase::Decode, Platform::Cuda);
}

struct WithEntry;

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for WithEntry {
    decode_body!(common::Bytes);
    const ENTRY: Entry = Entry::decode::<Self>();
}

// The place and the arguments are both wrong, and both are said to be.
#[mla_backend(sm = "90", dtype = "bf16")]
struct Both;

fn main() {}
