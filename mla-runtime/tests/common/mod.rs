//! A device that stores bytes and computes nothing, and bodies for backends that are never called.

#![allow(dead_code, unused_macros, reason = "each test program uses some of it")]

use std::cell::{Cell, RefCell};
use std::ops::Range;

use mla_cpu::{Buffer, Cpu};
use mla_runtime::Error;
use mla_runtime::spec::{Capability, Cause, Platform, Target};
use mla_runtime::tensor::{Layout, Memory};

#[macro_use]
mod forward;

use forward::*;

/// A device that claims to be an NVIDIA GPU, so that its backends may name capabilities. With
/// `PROCESSOR` it claims to be a processor. Only its transfers work; its other operations do
/// nothing.
#[derive(Clone)]
pub(crate) struct Bytes<const PROCESSOR: bool = false>;

thread_local! {
    static OPERATIONS: Cell<usize> = const { Cell::new(0) };
    static ORDINAL: Cell<usize> = const { Cell::new(0) };
    static HANDLE: Cell<usize> = const { Cell::new(0) };
    static OTHERS: RefCell<Vec<(Range<usize>, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Sets the handle number of this thread. No other handle may access memory of this one, except
/// that all may access memory of handle 0, the first one.
pub(crate) fn set_handle(handle: usize) {
    HANDLE.set(handle);
}

/// Sets the device number of this thread's handles.
pub(crate) fn set_ordinal(ordinal: usize) {
    ORDINAL.set(ordinal);
}

/// Counts an operation of this thread.
pub(crate) fn done() -> Result<()> {
    OPERATIONS.set(OPERATIONS.get() + 1);
    Ok(())
}

/// Returns the number of this thread's operations since the last call.
pub(crate) fn operations() -> usize {
    OPERATIONS.take()
}

impl<const PROCESSOR: bool> Memory for Bytes<PROCESSOR> {
    type Buffer = Buffer;

    mla_runtime::host_bytes!();

    fn allocate(&self, bytes: usize) -> Result<Self::Buffer> {
        let buffer = Buffer::zeroed(bytes)?;
        let handle = HANDLE.get();
        if handle != 0 {
            let range = buffer.as_bytes().as_ptr_range();
            let range = range.start.addr()..range.end.addr();
            OTHERS.with_borrow_mut(|others| others.push((range, handle)));
        }
        Ok(buffer)
    }

    fn check_bytes(&self, field: &'static str, bytes: Self::Bytes<'_>) -> Result<()> {
        let (at, handle) = (bytes.as_ptr().addr(), HANDLE.get());
        let owner = OTHERS.with_borrow(|others| {
            let owner = others.iter().find(|(range, _)| range.contains(&at));
            owner.map_or(handle, |(_, owner)| *owner)
        });
        if owner == handle {
            return Ok(());
        }
        let shown = |handle| format!("memory of handle {handle}");
        Err(Error::argument(field, shown(owner), shown(handle)))
    }

    fn bytes(buffer: &Self::Buffer) -> Self::Bytes<'_> {
        buffer.as_bytes()
    }

    fn bytes_mut(buffer: &mut Self::Buffer) -> Self::BytesMut<'_> {
        buffer.as_bytes_mut()
    }

    fn upload(&self, from: &[u8], to: Self::BytesMut<'_>) -> Result<()> {
        to.copy_from_slice(from);
        done()
    }

    fn download(&self, from: Self::Bytes<'_>, to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(from);
        done()
    }

    fn synchronize(&self) -> Result<()> {
        done()
    }
}

impl<const PROCESSOR: bool> Device for Bytes<PROCESSOR> {
    const PLATFORM: Platform = if PROCESSOR {
        Platform::Cpu
    } else {
        Platform::Cuda
    };

    fn availability() -> Result<(), Cause> {
        Ok(())
    }

    fn target(&self) -> Target {
        if PROCESSOR {
            Target::CPU
        } else {
            Target::present_gpu(Capability::new(9, 0))
        }
    }

    fn ordinal(&self) -> usize {
        ORDINAL.get()
    }

    fn check_tensor(&self, field: &'static str, layout: &Layout) -> Result<()> {
        match layout.has_unit_columns() {
            true => Ok(()),
            false => Err(Error::argument(field, layout, "a last axis of stride 1")),
        }
    }

    fn check_operand(&self, field: &'static str, tensor: TensorRef<'_, Self>) -> Result<()> {
        let layout = tensor.layout();
        match layout.strides.contains(&1) {
            true => Ok(()),
            false => Err(Error::argument(field, layout, "an axis of stride 1")),
        }
    }

    forwarded_operations!();
}

impl<const PROCESSOR: bool> Bytes<PROCESSOR> {
    fn operation(&self) -> Result<Option<&Cpu>> {
        done().map(|()| None)
    }
}

// The items that both traits require.
macro_rules! common_body {
    ($device:ty) => {
        type Device = $device;
        type State = ();
        type Metadata = ();

        fn new(
            _: &$device,
            _: &::mla_runtime::backend::LayerConfig,
        ) -> ::mla_runtime::Result<Self> {
            ::core::result::Result::Err(::mla_runtime::Error::argument("backend", "any", "none"))
        }

        fn state(
            &self,
            _: &$device,
            _: &::mla_runtime::backend::StepLimits,
        ) -> ::mla_runtime::Result<()> {
            ::core::result::Result::Ok(())
        }

        fn metadata(
            &self,
            _: &$device,
            _: &::mla_runtime::backend::StepLimits,
        ) -> ::mla_runtime::Result<()> {
            ::core::result::Result::Ok(())
        }
    };
}

// The method that runs a backend, which refuses every call. Paths are absolute, so that the macro
// works in a module with any names in scope.
macro_rules! refusing_body {
    ($device:ty, $run:ident, $Call:ident) => {
        common_body!($device);

        // Only this declaration needs `unsafe`. The attribute's own code must not need it.
        #[allow(unsafe_code)]
        unsafe fn $run(
            &self,
            _: &$device,
            _: ::mla_runtime::backend::$Call<'_, $device>,
            _: &mut (),
            _: &(),
        ) -> ::mla_runtime::Result<()> {
            ::core::result::Result::Err(::mla_runtime::Error::argument("backend", "any", "none"))
        }
    };
}

/// The items of an `impl PrefillBackend` that refuses every call.
macro_rules! prefill_body {
    ($device:ty) => {
        refusing_body!($device, prefill, PrefillCall);
    };
}

/// The items of an `impl DecodeBackend` that refuses every call.
macro_rules! decode_body {
    ($device:ty) => {
        refusing_body!($device, decode, DecodeCall);
    };
}

/// A decode backend with these arguments of the attribute, which is never called. Without a device
/// the macro writes a row of a table with the backend's name.
macro_rules! decode_backend {
    ($name:ident on $device:ty: $($arguments:tt)*) => {
        struct $name;

        #[::mla_runtime::mla_backend($($arguments)*)]
        impl ::mla_runtime::backend::DecodeBackend for $name {
            decode_body!($device);
        }
    };
    ($name:ident: $($arguments:tt)*) => {
        const _: () = {
            decode_backend!($name on common::Bytes: $($arguments)*);
        };
    };
}

/// A prefill backend in the same way.
macro_rules! prefill_backend {
    ($name:ident on $device:ty: $($arguments:tt)*) => {
        struct $name;

        #[::mla_runtime::mla_backend($($arguments)*)]
        impl ::mla_runtime::backend::PrefillBackend for $name {
            prefill_body!($device);
        }
    };
    ($name:ident: $($arguments:tt)*) => {
        const _: () = {
            prefill_backend!($name on common::Bytes: $($arguments)*);
        };
    };
}
