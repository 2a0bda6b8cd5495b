//! A launcher that knows only a kernel's cubin and its row of `code.json`. It links none of the
//! kernel's code, contains no offset of a parameter, and computes a launch from the row's
//! expressions.
//!
//! `cargo xtask cubins` makes the folder, which `MLA_CUBINS` names.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};

use cudarc::driver::{result, sys};
use mla_kernels::Cuda;
use mla_runtime::tensor::Memory as _;
use serde_json::{Value, json};

use crate::common::{download, gpu, upload};

/// The numbers of a call by name, such as `p.tokens`.
type Numbers = BTreeMap<String, i64>;

/// An expression of whole numbers with `+`, `-`, `*`, `/` rounding up, and parentheses.
struct Expression<'a> {
    rest: &'a str,
    numbers: &'a Numbers,
}

impl<'a> Expression<'a> {
    fn value(text: &'a str, numbers: &'a Numbers) -> i64 {
        let mut expression = Self {
            rest: text,
            numbers,
        };
        let value = expression.sum();
        assert_eq!(expression.rest.trim(), "", "{text}");
        value
    }

    fn take(&mut self, marks: &[char]) -> Option<char> {
        let rest = self.rest.trim_start();
        let mark = rest.chars().next().filter(|mark| marks.contains(mark))?;
        self.rest = &rest[1..];
        Some(mark)
    }

    fn sum(&mut self) -> i64 {
        let mut value = self.product();
        while let Some(mark) = self.take(&['+', '-']) {
            let other = self.product();
            value = if mark == '+' {
                value + other
            } else {
                value - other
            };
        }
        value
    }

    fn product(&mut self) -> i64 {
        let mut value = self.factor();
        while let Some(mark) = self.take(&['*', '/']) {
            let other = self.factor();
            value = match mark {
                '*' => value * other,
                _ => (value + other - 1) / other,
            };
        }
        value
    }

    fn factor(&mut self) -> i64 {
        if self.take(&['(']).is_some() {
            let value = self.sum();
            assert_eq!(self.take(&[')']), Some(')'), "{}", self.rest);
            return value;
        }
        let rest = self.rest.trim_start();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "._".contains(c);
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        self.rest = behind;
        let number = name
            .parse()
            .ok()
            .or_else(|| self.numbers.get(name).copied());
        number.unwrap_or_else(|| panic!("no number is called {name:?}"))
    }
}

/// A launch that is ready for the driver.
#[derive(Debug, PartialEq, Eq)]
struct Launch {
    /// The bytes of each parameter.
    parameters: Vec<Vec<u8>>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

/// Writes a number at the row's offset, with the row's size in bytes.
fn put(bytes: &mut [u8], field: &Value, value: i64) {
    let size = number(&field["bytes"]);
    let value = value.to_le_bytes();
    bytes[..size].copy_from_slice(&value[..size]);
}

fn launch(kernel: &Value, given: &Numbers) -> Launch {
    let row = &kernel["launch"];
    let unsupported = [
        &row["dependent_launch"],
        &row["tensor_maps"],
        &row["cluster"],
    ];
    assert_eq!(unsupported, [&json!(false), &json!([]), &json!([1, 1, 1])]);
    let mut numbers = given.clone();
    let mut parameters = Vec::new();
    for parameter in kernel["parameters"].as_array().unwrap() {
        let name = parameter["name"].as_str().unwrap();
        let mut bytes = vec![0; number(&parameter["bytes"])];
        match parameter["fields"].as_array() {
            Some(fields) => {
                for field in fields {
                    let name = format!("{name}.{}", field["name"].as_str().unwrap());
                    put(
                        &mut bytes[number(&field["offset"])..],
                        field,
                        numbers[&name],
                    );
                }
            }
            None => {
                let value = parameter["value"].as_str();
                let value =
                    value.map_or_else(|| numbers[name], |it| Expression::value(it, &numbers));
                put(&mut bytes, parameter, value);
                numbers.insert(name.to_owned(), value);
            }
        }
        parameters.push(bytes);
    }
    let axes = |axis: &dyn Fn(usize) -> i64| [0, 1, 2].map(|at| u32::try_from(axis(at)).unwrap());
    let shared = row["dynamic_shared"].as_str().unwrap();
    Launch {
        parameters,
        grid: axes(&|at| Expression::value(row["grid"][at].as_str().unwrap(), &numbers)),
        block: axes(&|at| row["block"][at].as_i64().unwrap()),
        shared: u32::try_from(Expression::value(shared, &numbers)).unwrap(),
    }
}

fn numbers<const N: usize>(given: [(&str, i64); N]) -> Numbers {
    given.map(|(name, value)| (name.to_owned(), value)).into()
}

#[test]
fn a_launch_is_worked_out_of_a_row() {
    let kernel = json!({
        "parameters": [
            { "name": "p", "offset": 0, "bytes": 16, "fields": [
                { "name": "from", "type": "pointer", "offset": 0, "bytes": 8 },
                { "name": "tokens", "type": "i32", "offset": 8, "bytes": 4 },
            ]},
            { "name": "tiles", "type": "u32", "offset": 16, "bytes": 4, "value": "p.tokens / 32" },
        ],
        "launch": {
            "grid": ["2 * (tiles + 1) - tiles * 1", "1", "1"], "block": [32, 8, 1],
            "cluster": [1, 1, 1], "dynamic_shared": "p.tokens * 4", "dependent_launch": false,
            "tensor_maps": [],
        },
    });
    let given = numbers([("p.from", 0x0102), ("p.tokens", 65)]);
    let expected = Launch {
        parameters: vec![
            vec![2, 1, 0, 0, 0, 0, 0, 0, 65, 0, 0, 0, 0, 0, 0, 0],
            vec![3, 0, 0, 0],
        ],
        grid: [5, 1, 1],
        block: [32, 8, 1],
        shared: 260,
    };
    assert_eq!(launch(&kernel, &given), expected);
}

/// Returns the folder of cubins, and its description.
fn manifest() -> (PathBuf, Value) {
    let folder = std::env::var_os("MLA_CUBINS").map_or("target/cubins".into(), PathBuf::from);
    let text = std::fs::read(folder.join("code.json")).unwrap_or_else(|error| {
        panic!(
            "{}: {error}; `cargo xtask cubins` makes it, MLA_CUBINS names it",
            folder.display()
        )
    });
    (folder, serde_json::from_slice(&text).unwrap())
}

/// Launches the kernel of a source whose row describes this call.
fn run(
    gpu: &Cuda,
    (folder, manifest): &(PathBuf, Value),
    [source, call]: [&str; 2],
    given: &Numbers,
) {
    let capability = gpu.gpu().capability;
    let own = format!("sm_{}{}", capability.major, capability.minor);
    let file = manifest["files"].as_array().unwrap().iter().find(|file| {
        let target = file["target"]
            .as_str()
            .unwrap()
            .trim_end_matches(['a', 'f']);
        file["source"] == source && target == own
    });
    let file = file.unwrap_or_else(|| panic!("no cubin of {source} for {own}"));
    let kernels = file["kernels"].as_array().unwrap().iter();
    let mut fitting =
        kernels.filter(|kernel| kernel["launch"]["when"].as_str().unwrap().starts_with(call));
    let kernel = fitting
        .next()
        .unwrap_or_else(|| panic!("{source}: no kernel for {call:?}"));
    let mut launch = launch(kernel, given);
    let path: &Path = &folder.join(file["file"].as_str().unwrap());
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let entry = CString::new(kernel["entry"].as_str().unwrap()).unwrap();
    let mut parameters: Vec<*mut c_void> = launch
        .parameters
        .iter_mut()
        .map(|bytes| bytes.as_mut_ptr().cast())
        .collect();
    let axes = |[x, y, z]: [u32; 3]| (x, y, z);
    gpu.bind().unwrap();
    let module = result::module::load(path).unwrap();
    // SAFETY: the module is loaded, and the entry is one of its kernels, or there is an error. Each
    // parameter has the size that the cubin states. The memory that parameters point to belongs to
    // the caller. It lives until the device has finished the launch, which is waited for here.
    unsafe {
        let function = result::module::get_function(module, entry).unwrap();
        let stream: sys::CUstream = gpu.raw_stream().cast();
        let (grid, block) = (axes(launch.grid), axes(launch.block));
        result::launch_kernel(
            function,
            grid,
            block,
            launch.shared,
            stream,
            &mut parameters,
        )
        .unwrap();
        gpu.synchronize().unwrap();
        result::module::unload(module).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn kernels_run_by_their_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    let upload = |bytes: &[u8]| upload(gpu, bytes).unwrap();
    let (tokens, heads) = (70usize, 33usize);
    let from: Vec<f32> = (0..tokens * heads).map(|i| i as f32 / 8.0).collect();
    let source = upload(bytemuck::cast_slice(&from));
    for heads_first in [0, 1] {
        let target = upload(&vec![0xff; from.len() * 4]);
        let rows = if heads_first == 1 { tokens } else { heads };
        let given = numbers([
            ("p.from", source.address() as i64),
            ("p.to", target.address() as i64),
            ("p.from_row_stride", rows as i64),
            ("p.to_head_stride", tokens as i64),
            ("p.tokens", tokens as i64),
            ("p.heads", heads as i64),
            ("p.heads_first", heads_first),
            ("p.unit", 2f32.to_bits().into()),
        ]);
        let call = format!("p.heads_first is {heads_first}");
        run(gpu, &manifest, ["cuda/all/lse.cu", &call], &given);
        let bytes = download(gpu, &target).unwrap();
        for (at, value) in bytemuck::pod_collect_to_vec::<u8, f32>(&bytes)
            .iter()
            .enumerate()
        {
            let (head, token) = (at / tokens, at % tokens);
            let place = if heads_first == 1 {
                at
            } else {
                token * heads + head
            };
            assert_eq!(*value, 2.0 * from[place], "head {head}, token {token}");
        }
    }

    // In e4m3, 0x38 is 1, 0x40 is 2, and 0xb8 is -1.
    let (rows, columns) = (5usize, 24usize);
    let codes: Vec<u8> = (0..rows * columns)
        .map(|i| [0x38, 0x40, 0xb8][i % 3])
        .collect();
    let codes_on_gpu = upload(&codes);
    let scale = upload(&3f32.to_le_bytes());
    let out = upload(&vec![0xff; codes.len() * 4]);
    let given = numbers([
        ("p.codes", codes_on_gpu.address() as i64),
        ("p.scales", scale.address() as i64),
        ("p.out", out.address() as i64),
        ("p.out_row_stride", columns as i64),
        ("p.rows", rows as i64),
        ("p.columns", columns as i64),
        ("p.first_row", 0),
        ("p.dtype", 3),
    ]);
    let call = "p.dtype is MLA_DTYPE_F32; p.columns is a multiple of 8";
    run(gpu, &manifest, ["cuda/all/dequantize.cu", call], &given);
    let bytes = download(gpu, &out).unwrap();
    let expected: Vec<f32> = (0..codes.len()).map(|i| [3.0, 6.0, -3.0][i % 3]).collect();
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), expected);
}
