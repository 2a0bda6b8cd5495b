//! The kernels' own code on the host: the division of batches among CTAs, the protocol of what is
//! divided, and refusals. One program, since each carries the code of all kernels.

#![cfg(feature = "sm90")]

mod decode;
mod prefill;
mod refusals;
mod sparse;
mod split_protocol;
