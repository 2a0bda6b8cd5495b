//! Tests of the kernels' own code on the host: the division of batches among CTAs, the protocol of
//! splits, and refusals. It is one program, since each program contains the code of all kernels.

#![cfg(feature = "sm90")]

#[path = "../calls/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod calls;
mod decode;
mod prefill;
mod refusals;
mod sparse;
mod split_protocol;

use mla_kernels::raw::{self, MlaStatus};

/// Returns the message of a call that is refused.
fn checked(name: &'static str, status: MlaStatus) -> Result<(), String> {
    // SAFETY: the status was returned by a function of `raw`.
    unsafe { raw::check(name, status) }.map_err(|error| error.to_string())
}

/// Calls `list` once for the number of items, and once more for the items.
fn listed<T: Clone + Default>(
    name: &'static str,
    list: impl Fn(*mut T, i32, &mut i32) -> MlaStatus,
) -> Vec<T> {
    let mut count = 0;
    checked(name, list(std::ptr::null_mut(), 0, &mut count)).unwrap();
    let room = count;
    let mut items = vec![T::default(); room as usize];
    checked(name, list(items.as_mut_ptr(), room, &mut count)).unwrap();
    items
}
