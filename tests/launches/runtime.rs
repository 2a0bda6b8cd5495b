//! A runtime of CUDA that records launches in place of making them. The library's launch functions
//! call it, because its names come before those of the toolkit's own runtime. It says that the
//! device is an H200.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::described;

/// Streaming multiprocessors, and bytes of L2.
pub(crate) const MULTIPROCESSORS: i32 = 132;
pub(crate) const L2_BYTES: i32 = 60 << 20;
/// Bytes of shared memory: of a CTA, and of an SM.
pub(crate) const SHARED_OF_CTA: i32 = 227 << 10;
pub(crate) const SHARED_OF_SM: i32 = 228 << 10;

const SUCCESS: c_int = 0;

/// A launch as the library made it.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) entry: String,
    /// The bytes of each parameter, if the kernel is described.
    pub(crate) parameters: Vec<Vec<u8>>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) dependent: bool,
}

/// The arguments of an encoded tensor map, as the driver numbers them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) kind: c_uint,
    pub(crate) address: u64,
    pub(crate) extents: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    pub(crate) boxes: Vec<u32>,
    /// Swizzle, promotion in L2 and value outside.
    pub(crate) modes: [c_uint; 3],
}

thread_local! {
    static LAUNCHES: RefCell<Vec<Recorded>> = const { RefCell::new(Vec::new()) };
    static MAPS: RefCell<Vec<Encoded>> = const { RefCell::new(Vec::new()) };
}

/// Returns what this thread has launched since the last call.
pub(crate) fn taken() -> (Vec<Recorded>, Vec<Encoded>) {
    (LAUNCHES.take(), MAPS.take())
}

/// The kernels' mangled names, by the addresses that stand for them on the host.
static KERNELS: Mutex<BTreeMap<usize, String>> = Mutex::new(BTreeMap::new());

#[repr(C)]
struct Attribute {
    id: c_uint,
    pad: c_uint,
    value: [u32; 16],
}

#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: usize,
    stream: *mut c_void,
    attributes: *const Attribute,
    count: c_uint,
}

const CLUSTER: c_uint = 4;
const DEPENDENT: c_uint = 6;

/// Returns the words of an attribute of a launch.
///
/// # Safety
///
/// `config` has `count` attributes.
unsafe fn attribute(config: &Config, id: c_uint) -> Option<[u32; 3]> {
    let all = match config.count {
        0 => &[][..],
        // SAFETY: the caller promises that these attributes exist.
        count => unsafe { std::slice::from_raw_parts(config.attributes, count as usize) },
    };
    let found = all.iter().find(|attribute| attribute.id == id)?;
    Some([found.value[0], found.value[1], found.value[2]])
}

// SAFETY: all calls in this program find the functions below. The linker takes the first definition
// of a name (build.rs allows several), and the objects of a test come before the toolkit's runtime.

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(_: *const c_void) -> *mut *mut c_void {
    static mut HANDLE: *mut c_void = std::ptr::null_mut();
    &raw mut HANDLE
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinaryEnd(_: *mut *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __cudaUnregisterFatBinary(_: *mut *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterVar() {}

#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaRegisterFunction(
    _: *mut *mut c_void,
    host: *const c_void,
    _: *const c_char,
    entry: *const c_char,
) {
    // SAFETY: nvcc's code calls this with the kernel's name.
    let entry = unsafe { CStr::from_ptr(entry) };
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    kernels.insert(host.addr(), entry.to_string_lossy().into_owned());
}

/// Functions that do nothing.
macro_rules! succeeding {
    ($($name:ident($($argument:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($(_: $argument),*) -> c_int {
            SUCCESS
        }
    )*};
}

succeeding! {
    cudaFuncSetAttribute(*const c_void, c_int, c_int);
    cudaFuncGetAttributes(*mut c_void, *const c_void);
    cudaGetLastError();
}

/// Launches of the form `<<<>>>`, of which the library makes none.
macro_rules! unused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            unreachable!()
        }
    )*};
}

unused! { __cudaPopCallConfiguration __cudaLaunchKernel __cudaGetKernel }

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDevice(device: *mut c_int) -> c_int {
    // SAFETY: the library passes the address of a number, here and below.
    unsafe { *device = 0 };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetAttribute(value: *mut c_int, which: c_int, _: c_int) -> c_int {
    let known = match which {
        16 => MULTIPROCESSORS,
        38 => L2_BYTES,
        75 => 9,
        76 => 0,
        81 => SHARED_OF_SM,
        97 => SHARED_OF_CTA,
        _ => unreachable!("attribute {which}"),
    };
    // SAFETY: as above.
    unsafe { *value = known };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaOccupancyMaxActiveClusters(
    clusters: *mut c_int,
    _: *const c_void,
    config: *const Config,
) -> c_int {
    // SAFETY: the library passes a launch's configuration.
    let size = unsafe { attribute(&*config, CLUSTER) };
    // SAFETY: as above.
    unsafe { *clusters = MULTIPROCESSORS / size.map_or(1, |[x, ..]| x as i32) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    function: *mut *const c_void,
    _: c_uint,
    _: u64,
    found: *mut c_int,
) -> c_int {
    // SAFETY: the library passes a name, and the addresses of both results.
    unsafe {
        assert_eq!(CStr::from_ptr(name), c"cuTensorMapEncodeTiled");
        *function = encode_tiled as *const c_void;
        *found = 0;
    }
    SUCCESS
}

/// Keeps the arguments of a tensor map, and writes their number, from 1 on, into the map.
unsafe extern "C" fn encode_tiled(
    map: *mut u64,
    kind: c_uint,
    rank: c_uint,
    base: *const c_void,
    extents: *const u64,
    strides: *const u64,
    boxes: *const u32,
    steps: *const u32,
    interleave: c_uint,
    swizzle: c_uint,
    promotion: c_uint,
    fill: c_uint,
) -> c_int {
    let rank = rank as usize;
    // SAFETY: arrays of the driver's function have an element for each axis, that of strides one
    // less. A map has 128 bytes.
    unsafe {
        let of = |from: *const u64, count| std::slice::from_raw_parts(from, count).to_vec();
        let of_words = |from: *const u32| std::slice::from_raw_parts(from, rank).to_vec();
        assert_eq!((of_words(steps), interleave), (vec![1; rank], 0));
        let encoded = Encoded {
            kind,
            address: base.addr() as u64,
            extents: of(extents, rank),
            strides: of(strides, rank - 1),
            boxes: of_words(boxes),
            modes: [swizzle, promotion, fill],
        };
        MAPS.with_borrow_mut(|maps| {
            maps.push(encoded);
            *map = maps.len() as u64;
        });
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchKernelExC(
    config: *const Config,
    kernel: *const c_void,
    parameters: *const *const u8,
) -> c_int {
    let kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = kernels[&kernel.addr()].clone();
    // SAFETY: the library passes a configuration, and as many parameters as the kernel has.
    let config = unsafe { &*config };
    let sizes = described::parameters(&entry).into_iter().enumerate();
    let parameters = sizes.map(|(at, bytes)| {
        // SAFETY: as above; a description with a parameter of another size does not fit a cubin.
        unsafe { std::slice::from_raw_parts(*parameters.add(at), bytes).to_vec() }
    });
    let recorded = Recorded {
        entry,
        parameters: parameters.collect(),
        grid: config.grid,
        block: config.block,
        // SAFETY: as above.
        cluster: unsafe { attribute(config, CLUSTER) }.unwrap_or([1; 3]),
        shared: config.shared as u32,
        // SAFETY: as above.
        dependent: unsafe { attribute(config, DEPENDENT) }.is_some_and(|it| it[0] != 0),
    };
    LAUNCHES.with_borrow_mut(|all| all.push(recorded));
    SUCCESS
}
