//! The addresses of a decode call's tensors, after the call was checked.

use mla_kernels::Cuda;
use mla_runtime::backend::{DecodeCall, Output, Query};
use mla_runtime::tensor::{Layout, LseMut};
use mla_runtime::{Error, Result};

/// The place of a tensor in the device's memory.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) layout: Layout,
}

/// The tensors of a dense call with split queries.
pub(crate) struct Absorbed<'a> {
    pub(crate) latent: Place,
    pub(crate) rope: Place,
    pub(crate) out: Place,
    pub(crate) lse: Option<LseMut<'a, Cuda>>,
    pub(crate) tokens: usize,
}

impl<'a> Absorbed<'a> {
    /// Collects the tensors of a call.
    ///
    /// # Errors
    ///
    /// If the call is of another kind.
    pub(crate) fn of(call: DecodeCall<'a, Cuda>) -> Result<Self> {
        let (Query::Split { latent, rope }, Output::Plain(out)) = (call.query, call.out) else {
            let given = "a query in one, or an output in e4m3";
            return Err(Error::argument("call", given, "split and plain"));
        };
        let tokens = latent.shape()[0];
        let out_layout = *out.layout();
        Ok(Self {
            latent: Place {
                address: latent.bytes().address(),
                layout: *latent.layout(),
            },
            rope: Place {
                address: rope.bytes().address(),
                layout: *rope.layout(),
            },
            out: Place {
                address: out.into_bytes().address(),
                layout: out_layout,
            },
            lse: call.lse,
            tokens,
        })
    }
}
