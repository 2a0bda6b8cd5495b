//! The code that the driver loaded for the kernels of a graph.
//!
//! A family has machine code for several GPUs, and PTX for the others. The driver chooses which of
//! it runs, so this module asks the driver.

use std::ffi::{CStr, c_char, c_void};
use std::{mem, ptr};

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUfunction_attribute::{
    self, CU_FUNC_ATTRIBUTE_BINARY_VERSION, CU_FUNC_ATTRIBUTE_PTX_VERSION,
};
use cudarc::driver::sys::{self, CUfunction, CUgraphNode, CUgraphNodeType, CUresult};
use mla_runtime::Result;
use mla_runtime::spec::Capability;

use super::graph::Graph;
use super::{Cuda, failed};

impl Cuda {
    /// Returns the kernels that a graph of this device launches, one entry for each launch, in no
    /// particular order. An entry has the name in the machine code, as the C++ compiler mangled it,
    /// unless the driver is older than CUDA 12.3. Then come two GPUs: the one for which nvcc or the
    /// driver made the machine code, and the one for which the PTX was made that became it.
    ///
    /// # Errors
    ///
    /// If the driver refuses, or if the graph belongs to another stream.
    pub fn loaded_kernels(&self, graph: &Graph) -> Result<Vec<(Option<String>, [Capability; 2])>> {
        self.check_stream("graph", graph.stream_id())?;
        self.make_current()?;
        let nodes = nodes(graph).map_err(failed("list a graph's nodes"))?;
        let functions: std::result::Result<Vec<_>, _> = nodes
            .into_iter()
            .filter_map(|node| function(node).transpose())
            .collect();
        functions
            .and_then(|functions| functions.into_iter().map(describe).collect())
            .map_err(failed("ask for loaded code"))
    }
}

fn nodes(graph: &Graph) -> std::result::Result<Vec<CUgraphNode>, DriverError> {
    let mut count = 0;
    // SAFETY: the graph lives. Without an array for the nodes, the driver writes only their number.
    unsafe { sys::cuGraphGetNodes(graph.raw(), ptr::null_mut(), &raw mut count) }.result()?;
    let mut nodes = vec![ptr::null_mut(); count];
    // SAFETY: there is room for as many nodes as `count` says.
    unsafe { sys::cuGraphGetNodes(graph.raw(), nodes.as_mut_ptr(), &raw mut count) }.result()?;
    nodes.truncate(count);
    Ok(nodes)
}

/// Returns the function that a node launches, or `None` if it is no kernel's node.
fn function(node: CUgraphNode) -> std::result::Result<Option<CUfunction>, DriverError> {
    let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node is one of a graph that lives.
    unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result()?;
    if kind != CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    // SAFETY: the struct has only numbers and pointers, all of which may be zero.
    let mut launch: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { mem::zeroed() };
    // SAFETY: the node belongs to a kernel and to a graph that lives.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(node, &raw mut launch) }.result()?;
    if !launch.func.is_null() {
        return Ok(Some(launch.func));
    }
    // A kernel without a function belongs to no context, but has a function in the current one.
    let mut function = ptr::null_mut();
    // SAFETY: a node without a function has a kernel, and a context is current.
    unsafe { sys::cuKernelGetFunction(&raw mut function, launch.kern) }.result()?;
    Ok(Some(function))
}

fn describe(
    function: CUfunction,
) -> std::result::Result<(Option<String>, [Capability; 2]), DriverError> {
    let version = |attribute: CUfunction_attribute| {
        let mut version = 0;
        // SAFETY: the function is loaded, as its graph was instantiated.
        unsafe { sys::cuFuncGetAttribute(&raw mut version, attribute, function) }.result()?;
        Ok::<_, DriverError>(capability(version))
    };
    let machine_code = version(CU_FUNC_ATTRIBUTE_BINARY_VERSION)?;
    let ptx = version(CU_FUNC_ATTRIBUTE_PTX_VERSION)?;
    Ok((symbol(function)?, [machine_code, ptx]))
}

/// Type of the driver function that names a kernel's function. It came with CUDA 12.3.
type FunctionName = unsafe extern "C" fn(*mut *const c_char, CUfunction) -> CUresult;

/// Looks up the driver function, since cudarc declares it only for CUDA 12.3 and later.
fn function_name() -> Option<FunctionName> {
    let mut found = ptr::null_mut();
    let name = c"cuFuncGetName".as_ptr();
    // SAFETY: the name ends in NUL. The driver writes to one place that lives. The pointer for a
    // status may be null.
    let result =
        unsafe { sys::cuGetProcAddress_v2(name, &raw mut found, 12030, 0, ptr::null_mut()) };
    let exists = result.result().is_ok() && !found.is_null();
    // SAFETY: the driver returned the address of the function of this name and version. CUDA's
    // header declares this type for it.
    exists.then(|| unsafe { mem::transmute::<*mut c_void, FunctionName>(found) })
}

fn symbol(function: CUfunction) -> std::result::Result<Option<String>, DriverError> {
    let Some(name_of) = function_name() else {
        return Ok(None);
    };
    let mut name = ptr::null();
    // SAFETY: the function is loaded, as its graph was instantiated.
    unsafe { name_of(&raw mut name, function) }.result()?;
    // SAFETY: the driver returned a string that ends in NUL and lives as long as the function.
    let name = unsafe { CStr::from_ptr(name) };
    Ok(Some(name.to_string_lossy().into_owned()))
}

/// Splits a number that is ten times the major version plus the minor one.
fn capability(version: i32) -> Capability {
    // No GPU has a number that does not fit.
    let part = |number: i32| u8::try_from(number).unwrap_or(u8::MAX);
    Capability::new(part(version / 10), part(version % 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_capabilities() {
        for (version, expected) in [(80, (8, 0)), (90, (9, 0)), (103, (10, 3)), (121, (12, 1))] {
            assert_eq!(capability(version), Capability::new(expected.0, expected.1));
        }
        assert_eq!(capability(-10).major, u8::MAX);
    }
}
