//! The surroundings of a launch under stress: buffers, random contents made on the device, a kernel
//! that fills shared memory, and a comparison on the device.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, result};

/// Words of shared memory that a CTA may request on Hopper.
const SHARED_WORDS: u32 = 227 * 256;

/// Returns the addresses of a kernel's arguments.
macro_rules! arguments {
    ($($argument:expr),*) => {
        &mut [$((&raw const $argument).cast_mut().cast::<c_void>()),*]
    };
}

/// Contents of a buffer, finite in their type and of magnitudes from 2^-4 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Values {
    Bf16,
    F16,
    F32,
    E4m3,
    /// Rows of `fp8_ds_mla` with latents of 512, which have this number of words.
    DsMla(u32),
}

impl Values {
    /// Returns the arguments `keep`, `shift`, `vary` and `add` of `fill_random`.
    fn fields(self) -> [u32; 4] {
        match self {
            Self::Bf16 => [0x807f_807f, 1, 0x0180_0180, 0x3d80_3d80],
            Self::F16 => [0x83ff_83ff, 1, 0x0c00_0c00, 0x2c00_2c00],
            Self::F32 => [0x807f_ffff, 1, 0x0180_0000, 0x3d80_0000],
            Self::E4m3 | Self::DsMla(_) => [0x8787_8787, 2, 0x1818_1818, 0x2020_2020],
        }
    }
}

/// A stream, and the kernels of `stress.ptx`.
pub(crate) struct Machine {
    stream: Arc<CudaStream>,
    fill_shared: CUfunction,
    fill_random: CUfunction,
    compare: CUfunction,
    ctas: u32,
}

/// Device memory by address. It lives as long as its owner, [`Memory`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) address: CUdeviceptr,
    pub(crate) bytes: usize,
}

impl Region {
    pub(crate) fn pointer<T>(self) -> *mut T {
        self.address as *mut T
    }
}

/// The allocations of a case.
#[derive(Default)]
pub(crate) struct Memory {
    slices: Vec<CudaSlice<u8>>,
}

impl Machine {
    pub(crate) fn new(stream: Arc<CudaStream>) -> Self {
        let context = stream.context();
        context.bind_to_thread().unwrap();
        let source = CString::new(include_str!("stress.ptx")).unwrap();
        // SAFETY: the image is a text that ends in 0. Its module lives as long as the context.
        let module = unsafe { result::module::load_data(source.as_ptr().cast()) }.unwrap();
        let function = |name| {
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, CString::new(name).unwrap()) }.unwrap()
        };
        let fill_shared = function("fill_shared");
        // SAFETY: the function belongs to a loaded module.
        unsafe {
            result::function::set_function_attribute(
                fill_shared,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                (SHARED_WORDS * 4) as i32,
            )
        }
        .unwrap();
        let multiprocessors = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .unwrap();
        Self {
            fill_random: function("fill_random"),
            compare: function("compare"),
            fill_shared,
            ctas: 2 * multiprocessors as u32,
            stream,
        }
    }

    pub(crate) fn raw_stream(&self) -> *mut std::ffi::c_void {
        self.stream.cu_stream().cast()
    }

    pub(crate) fn synchronize(&self) {
        self.stream.synchronize().unwrap();
    }

    /// Allocates zeros.
    pub(crate) fn zeros(&self, memory: &mut Memory, bytes: usize) -> Region {
        let slice = self
            .stream
            .alloc_zeros::<u8>(bytes.next_multiple_of(256).max(256))
            .unwrap();
        let address = slice.device_ptr(&self.stream).0;
        memory.slices.push(slice);
        Region { address, bytes }
    }

    /// Allocates random elements, which depend only on the seed.
    pub(crate) fn random(
        &self,
        memory: &mut Memory,
        bytes: usize,
        values: Values,
        seed: u32,
    ) -> Region {
        let region = self.zeros(memory, bytes);
        let words = (bytes as u64).div_ceil(4);
        let [keep, shift, vary, add] = values.fields();
        let (row, first, last) = match values {
            Values::DsMla(words) => (words, 128u32, 132u32),
            _ => (0, 0, 0),
        };
        let tail = Values::Bf16.fields()[3];
        // SAFETY: the arguments are those that `stress.ptx` declares. The words lie in the region,
        // which is rounded up to 256 bytes.
        unsafe {
            self.launch(
                self.fill_random,
                0,
                arguments![
                    region.address,
                    words,
                    seed,
                    keep,
                    shift,
                    vary,
                    add,
                    row,
                    first,
                    last,
                    tail
                ],
            );
        }
        region
    }

    pub(crate) fn upload<T: Pod>(&self, memory: &mut Memory, words: &[T]) -> Region {
        let region = self.zeros(memory, size_of_val(words));
        // The copy does not wait for a stream.
        self.synchronize();
        // SAFETY: the region has room for the words, and the copy is complete when this returns.
        unsafe { result::memcpy_htod_sync(region.address, words) }.unwrap();
        region
    }

    /// Sets all bytes from `from` on to `byte`.
    pub(crate) fn fill(&self, region: Region, from: usize, byte: u8) {
        if region.bytes > from {
            // SAFETY: the bytes lie in the region.
            unsafe {
                result::memset_d8_async(
                    region.address + from as CUdeviceptr,
                    byte,
                    region.bytes - from,
                    self.stream.cu_stream(),
                )
            }
            .unwrap();
        }
    }

    pub(crate) fn copy(&self, from: Region, to: Region) {
        assert_eq!(from.bytes, to.bytes);
        // SAFETY: both regions are of this size.
        unsafe {
            result::memcpy_dtod_async(
                to.address,
                from.address,
                from.bytes,
                self.stream.cu_stream(),
            )
        }
        .unwrap();
    }

    /// Copies the two parts of queries to rows side by side. The rows have 512 and 64 elements of
    /// 16 bits, at a distance of 576 elements.
    #[cfg(feature = "sm90")]
    pub(crate) fn without_gaps(
        &self,
        memory: &mut Memory,
        parts: [*const c_void; 2],
        rows: i32,
    ) -> [*const c_void; 2] {
        let mut widths = [512, 64].into_iter();
        parts.map(|part| {
            let bytes = 2 * widths.next().unwrap();
            let to = self.zeros(memory, rows as usize * bytes).address;
            for row in 0..rows as u64 {
                let [from, to] =
                    [(part as u64, 2 * 576), (to, bytes as u64)].map(|(address, stride)| Region {
                        address: address + row * stride,
                        bytes,
                    });
                self.copy(from, to);
            }
            to as *const c_void
        })
    }

    /// Enqueues a kernel that leaves a pattern in the shared memory of every SM.
    pub(crate) fn poison(&self, number: u32) {
        // The patterns are zeros, ones, NaN, the smallest positive and the minimum word, and random
        // words.
        let (pattern, hashed) = match number % 7 {
            0 => (0, 0u32),
            1 => (u32::MAX, 0),
            2 => (0x7fc0_7fc0, 0),
            3 => (1, 0),
            4 => (0x8000_0000, 0),
            _ => (number, 1),
        };
        let words = SHARED_WORDS;
        // SAFETY: the arguments are those that `stress.ptx` declares, and the CTA has this number
        // of words.
        unsafe {
            self.launch(
                self.fill_shared,
                SHARED_WORDS * 4,
                arguments![pattern, hashed, words],
            );
        }
    }

    /// Adds the number of words that differ to the counter at `count`.
    pub(crate) fn compare(&self, a: Region, b: Region, count: CUdeviceptr) {
        assert!(a.bytes == b.bytes && a.bytes.is_multiple_of(4));
        let words = a.bytes as u64 / 4;
        // SAFETY: the arguments are those that `stress.ptx` declares, and the words lie in both
        // regions.
        unsafe {
            self.launch(
                self.compare,
                0,
                arguments![a.address, b.address, words, count],
            );
        }
    }

    pub(crate) fn download(&self, region: Region) -> Vec<u32> {
        self.synchronize();
        let mut words = vec![0u32; region.bytes / 4];
        // SAFETY: the region has this number of words, and nothing writes to it.
        unsafe { result::memcpy_dtoh_sync(&mut words, region.address) }.unwrap();
        words
    }

    /// Enqueues one of the kernels of `stress.ptx`.
    ///
    /// # Safety
    ///
    /// `arguments` are addresses of values of the types that the kernel declares, in their order.
    /// The memory that they name is valid.
    unsafe fn launch(&self, kernel: CUfunction, shared_bytes: u32, arguments: &mut [*mut c_void]) {
        // SAFETY: this function's caller keeps the same contract.
        unsafe {
            result::launch_kernel(
                kernel,
                (self.ctas, 1, 1),
                (512, 1, 1),
                shared_bytes,
                self.stream.cu_stream(),
                arguments,
            )
        }
        .unwrap();
    }
}
