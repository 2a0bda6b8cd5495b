//! The operations on a GPU in bf16, with the kernels in `kernels/all/rows.cu`.

use mla_kernels::Cuda;
use mla_runtime::prelude::*;
use mla_runtime::{Error, Result};

use super::Operations;
use crate::config::Routing;

#[allow(
    missing_docs,
    non_snake_case,
    dead_code,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    reason = "bindgen writes it"
)]
mod ffi {
    include!(concat!(env!("OUT_DIR"), "/engine_rows.rs"));
}

type Launch<Params> = unsafe extern "C" fn(*const Params, *mut std::ffi::c_void) -> i32;

/// The addresses of the operands and the result of a launch.
struct Rows<'a> {
    from: TensorRef<'a, Cuda>,
    other: u64,
    to: u64,
    to_stride: usize,
    width: usize,
    count: usize,
    eps: f32,
}

/// # Safety
///
/// Memory that the parameters point to is readable, and writable for results, as the header says.
unsafe fn enqueue<Params>(
    gpu: &Cuda,
    name: &'static str,
    launch: Launch<Params>,
    params: &Params,
) -> Result<()> {
    gpu.bind()?;
    // SAFETY: the contract of the launch, which is this function's own.
    match unsafe { launch(params, gpu.raw_stream()) } {
        0 => Ok(()),
        status => Err(Error::Device {
            device: "cuda",
            operation: name,
            message: format!("cudaError {status}"),
        }),
    }
}

fn enqueue_rows(
    gpu: &Cuda,
    name: &'static str,
    launch: Launch<ffi::EngineRows>,
    rows: &Rows<'_>,
) -> Result<()> {
    let params = ffi::EngineRows {
        from: rows.from.bytes().address() as *const _,
        other: rows.other as *const _,
        to: rows.to as *mut _,
        from_stride: rows.from.layout().strides[0] as i64,
        to_stride: rows.to_stride as i64,
        rows: rows.count as i32,
        width: rows.width as i32,
        eps: rows.eps,
    };
    // SAFETY: every tensor holds what its layout says. Results are borrowed mutably. The engine's
    // own ids are below the number of gathered rows.
    unsafe { enqueue(gpu, name, launch, &params) }
}

/// Returns the common parameters, from rows of `from` to rows of `to`.
fn rows<'a>(from: TensorRef<'a, Cuda>, other: u64, to: TensorMut<'_, Cuda>) -> Rows<'a> {
    let layout = *to.layout();
    Rows {
        from,
        other,
        to: to.into_bytes().address(),
        to_stride: layout.strides[0],
        width: layout.shape[2],
        count: layout.shape[0],
        eps: 0.0,
    }
}

impl Operations for Cuda {
    const DTYPE: DType = DType::BF16;

    fn open() -> Result<Self> {
        Self::new(0)
    }

    fn norm(
        &self,
        from: TensorRef<'_, Self>,
        weight: TensorRef<'_, Self>,
        eps: f32,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let rows = rows(from, weight.bytes().address(), to);
        enqueue_rows(self, "norm", ffi::engine_norm, &Rows { eps, ..rows })
    }

    fn add(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        enqueue_rows(self, "add", ffi::engine_add, &rows(from, 0, to))
    }

    fn silu_mul(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        enqueue_rows(self, "silu_mul", ffi::engine_silu_mul, &rows(from, 0, to))
    }

    fn route(
        &self,
        routing: &Routing,
        logits: TensorRef<'_, Self>,
        bias: TensorRef<'_, Self>,
        weights: TensorMut<'_, Self>,
    ) -> Result<()> {
        let params = ffi::EngineRoute {
            logits: logits.bytes().address() as *const _,
            bias: bias.bytes().address() as *const _,
            rows: logits.shape()[0] as i32,
            weights: weights.into_bytes().address() as *mut _,
            experts: routing.experts as i32,
            per_token: routing.per_token as i32,
            groups: routing.groups as i32,
            groups_per_token: routing.groups_per_token as i32,
            normalise: i32::from(routing.normalise),
            scale: routing.scale,
        };
        // SAFETY: the model's views are rows without gaps, with an entry per expert. A
        // configuration has at most 256 experts. Weights are borrowed mutably.
        unsafe { enqueue(self, "route", ffi::engine_route, &params) }
    }

    fn add_weighted(
        &self,
        from: TensorRef<'_, Self>,
        weights: TensorRef<'_, Self>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let [experts, rows, width] = from.shape();
        let params = ffi::EngineAddWeighted {
            from: from.bytes().address() as *const _,
            weights: weights.bytes().address() as *const _,
            to: to.into_bytes().address() as *mut _,
            rows: rows as i32,
            experts: experts as i32,
            width: width as i32,
        };
        // SAFETY: the model's views have these shapes without gaps, and results are borrowed
        // mutably.
        unsafe { enqueue(self, "add_weighted", ffi::engine_add_weighted, &params) }
    }

    fn gather(
        &self,
        from: TensorRef<'_, Self>,
        ids: Self::Bytes<'_>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let rows = rows(from, ids.address(), to);
        enqueue_rows(self, "gather", ffi::engine_gather, &rows)
    }

    fn argmax(&self, from: TensorRef<'_, Self>, to: Self::BytesMut<'_>) -> Result<()> {
        let [count, _, width] = from.shape();
        let rows = Rows {
            from,
            other: 0,
            to: to.address(),
            to_stride: 0,
            width,
            count,
            eps: 0.0,
        };
        enqueue_rows(self, "argmax", ffi::engine_argmax, &rows)
    }
}
