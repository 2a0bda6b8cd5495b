//! The division of batches by kernels among CTAs, and the protocol of what is divided: computed on
//! the host by their own code, in one program, since each carries the code of all kernels.

#![cfg(feature = "sm90")]

mod decode;
mod prefill;
mod sparse;
mod split_protocol;
