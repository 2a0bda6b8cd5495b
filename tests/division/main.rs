//! Tests of the kernels' own code on the host: the division of batches among CTAs, the protocol of
//! splits, and refusals. It is one program, since each program contains the code of all kernels.

#![cfg(feature = "sm90")]

mod decode;
mod prefill;
mod refusals;
mod sparse;
mod split_protocol;
