// Places where the attribute does not belong.

use mla_runtime::Result;
use mla_runtime::backend::DecodeBackend as D;
use mla_runtime::backend::{DecodeBackend, DecodeCall, Entry, PrefillBackend};
use mla_runtime::mla_backend;
use mla_runtime::spec::{BackendSpec, Phase, Platform};

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
impl mla_runtime::backend::DecodeBackends for Struct {
    decode_body!(common::Bytes);
}

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

// Both the place and the arguments are wrong, and both are reported.
#[mla_backend(sm = "90", dtype = "bf16")]
struct Both;

struct Renamed;

// The functions show which trait was meant, so the block can be checked as one of that trait.
#[mla_backend(sm = "90", dtypes = "bf16")]
impl D for Renamed {
    common_body!(common::Bytes);

    unsafe fn decode(
        &self,
        _: &common::Bytes,
        _: DecodeCall<'_, common::Bytes>,
        _: &mut (),
        _: &(),
    ) -> Result<()> {
        Ok(())
    }
}

struct Borrowed<'a>(&'a str);

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for Borrowed<'_> {
    decode_body!(common::Bytes);
}

#[mla_backend(sm = "90", dtypes = "bf16")]
impl<'a> PrefillBackend for Borrowed<'a> {
    prefill_body!(common::Bytes);
}

struct Borrows;

#[mla_backend(sm = "90", dtypes = "bf16", name = "BORROWS")]
impl DecodeBackend for &Borrows {
    decode_body!(common::Bytes);
}

struct Swapped;

#[mla_backend(sm = "90", dtypes = "bf16")]
impl Swapped for DecodeBackend {
    decode_body!(common::Bytes);
}

struct Misspelt;

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodBackend for Misspelt {
    decode_body!(common::Bytes);
}

struct Conditional;

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for Conditional {
    decode_body!(common::Bytes);
    #[cfg(any())]
    const SPEC: u32 = 0;
}

fn main() {}
