//! Peak rates of a GPU, from figures that the driver reports.

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::{CudaContext, result};
use mla_runtime::plan::crossover::Machine;
use mla_runtime::spec::Capability;

use crate::gpu::Gpu;

/// Fractions of an H200's peak rates at its reported clocks that large GEMMs and copies reach: 795
/// of 1070 TFLOP/s, and 4.2 of 4.92 TB/s.
const FLOP_REACHED: f64 = 0.743;
const BYTES_REACHED: f64 = 0.854;

/// Returns the figures for the model of a layer's times, or `None` if the driver does not report
/// them.
pub(super) fn of(context: &CudaContext, gpu: &Gpu) -> Option<Machine> {
    let figure = |attribute| {
        // SAFETY: the device is the context's, which lives.
        let figure = unsafe { result::device::get_attribute(context.cu_device(), attribute) };
        figure.ok().map(f64::from)
    };
    let multiprocessors = u32::try_from(gpu.multiprocessors).ok()?;
    // The driver gives both clocks in kHz.
    let clock = 1e3 * figure(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
    let memory_clock = 1e3 * figure(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
    let bus_bits = figure(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
    let flop = f64::from(multiprocessors) * clock * flop_per_cycle(gpu.capability);
    // The memory transfers twice in each cycle.
    let bytes = 2.0 * memory_clock * bus_bits / 8.0;
    Machine::gpu(multiprocessors, FLOP_REACHED * flop, BYTES_REACHED * bytes).ok()
}

/// Returns the FLOP that the tensor cores of one multiprocessor do per cycle in bf16. The numbers
/// are the rates of the data sheets, divided by clocks and multiprocessors.
const fn flop_per_cycle(capability: Capability) -> f64 {
    match (capability.major, capability.minor) {
        (8, 0) => 2048.0,
        (8, _) | (12, _) => 1024.0,
        (10, _) => 8192.0,
        _ => 4096.0,
    }
}
