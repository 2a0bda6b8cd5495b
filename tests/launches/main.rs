//! The descriptions of launches in `cuda/launches.json`, held to the launches that the library
//! makes. The library's own launch functions run against a runtime of CUDA that records launches
//! ([`runtime`]), so no GPU is needed. Each recorded launch is worked out once more from the
//! kernel's description and from those of its numbers that the caller chooses. Both must be the
//! same: every computed field, grid, CTA, cluster, shared memory, and each tensor map.
#![cfg(any(feature = "sm80", feature = "sm90"))]

#[path = "../calls/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod calls;
mod described;
#[path = "../launcher/mod.rs"]
mod launcher;
mod prefill;
mod runtime;
#[cfg(feature = "sm80")]
mod sm80;
#[cfg(feature = "sm90")]
mod sm90_decode;
#[cfg(feature = "sm90")]
mod sm90_indexer;

use std::collections::{BTreeMap, BTreeSet};

use calls::dims_of;
use launcher::{Field, Numbers, launch, number, numbers};
use mla_kernels::raw::{MlaDecodeParams, MlaSparseParams, MlaStatus};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use runtime::{Encoded, Recorded};
use serde_json::{Value, json};

/// An address that no launch follows, since no kernel runs.
const ADDRESS: usize = 1 << 40;

/// The n-th of distinct addresses.
fn address<T>(n: usize) -> *mut T {
    std::ptr::without_provenance_mut(ADDRESS + (n << 32))
}

/// The widths of rows that dense decodes take.
const ROWS: [MlaDims; 4] = [
    MlaDims::R1,
    dims_of(512, 0),
    dims_of(256, 64),
    dims_of(256, 32),
];

/// A dense decode at addresses of its own.
fn decode(
    dims: MlaDims,
    dtype: DType,
    format: KvFormat,
    rows: [i32; 2],
    batch: [i32; 2],
) -> MlaDecodeParams {
    let plain = calls::decode(dims, dtype, format, rows, batch);
    let [latent, rope] = [dims.latent, dims.head.rope].map(i64::from);
    let heads = i64::from(rows[0]);
    // No two numbers of a call are the same, so that a description cannot name one for another.
    MlaDecodeParams {
        q_latent: address(1),
        q_rope: address(2),
        cache: address(3),
        block_table: address(4),
        kv_lens: address(5),
        out: address(6),
        lse: address(7),
        workspace: address(8),
        workspace_bytes: 1 << 30,
        q_latent_token_stride: heads * latent,
        q_latent_head_stride: latent,
        q_rope_token_stride: heads * rope,
        q_rope_head_stride: rope,
        block_table_stride: plain.block_table_stride + 8,
        ..plain
    }
}

/// A sparse decode of 512 latent columns at addresses of its own.
fn sparse(
    rope: u32,
    dtype: DType,
    format: KvFormat,
    heads: i32,
    extents: [i32; 3],
) -> MlaSparseParams {
    MlaSparseParams {
        q_latent: address(1),
        q_rope: address(2),
        cache: address(3),
        lists: address(4),
        out: address(6),
        lse: address(7),
        ..calls::sparse(dims_of(512, rope), dtype, format, heads, extents)
    }
}

/// Launches of the kernels of a folder. Every kernel there must be launched at least once.
struct Held {
    seen: BTreeSet<String>,
    wrong: Vec<String>,
}

impl Held {
    fn all_of(folder: &'static str, cases: impl FnOnce(&mut Self)) {
        let mut held = Self {
            seen: BTreeSet::new(),
            wrong: Vec::new(),
        };
        cases(&mut held);
        let all = described::ALL.iter();
        let own = all.filter(|(_, kernel)| kernel.source.starts_with(folder));
        for (entry, kernel) in own {
            if !held.seen.contains(entry) {
                let name = &kernel.kernel["name"];
                held.wrong.push(format!("{name}: no case launches it"));
            }
        }
        held.wrong.sort();
        held.wrong.dedup();
        assert!(held.wrong.is_empty(), "{}", held.wrong.join("\n"));
    }

    /// Compares the launches of a call with their descriptions. `choices` returns the caller's
    /// numbers that are no parameters for a launch.
    fn holds<const N: usize>(
        &mut self,
        call: impl FnOnce() -> MlaStatus,
        choices: impl Fn(&Recorded) -> [(&'static str, i64); N],
    ) {
        let status = call();
        // SAFETY: the texts of a status of the library are null, or constants.
        unsafe { mla_kernels::raw::check("launch", status) }.unwrap();
        let (launches, maps) = runtime::taken();
        assert!(!launches.is_empty(), "nothing was launched");
        for recorded in launches {
            let kernel = &described::ALL[&recorded.entry].kernel;
            let name = kernel["name"].as_str().unwrap();
            let differences = match kernel["launch"].is_null() {
                true => vec!["no row describes it".to_owned()],
                false => differences(kernel, &recorded, &maps, &numbers(choices(&recorded))),
            };
            let differences = differences.into_iter();
            self.wrong
                .extend(differences.map(|it| format!("{name}: {it}")));
            self.seen.insert(recorded.entry);
        }
    }
}

#[cfg(feature = "sm90")]
impl Recorded {
    /// The number that the library chose for a field.
    fn number(&self, name: &str) -> i64 {
        let fields = launcher::fields(&described::ALL[&self.entry].kernel);
        let field = fields.iter().find(|field| field.name == name);
        field.map_or(0, |field| value(field, &self.parameters))
    }
}

/// The first bytes of a field as a number. That of a tensor map is 0 if it was not encoded.
fn value(field: &Field<'_>, parameters: &[Vec<u8>]) -> i64 {
    let size = match field.row["type"] == "CUtensorMap" {
        true => 8,
        false => number(&field.row["bytes"]),
    };
    let mut bytes = [0; 8];
    bytes[..size].copy_from_slice(&parameters[field.parameter][field.offset..][..size]);
    let value = i64::from_le_bytes(bytes);
    match field.row["type"].as_str() {
        Some("i32") => i64::from(value as i32),
        _ => value,
    }
}

fn differences(
    kernel: &Value,
    recorded: &Recorded,
    maps: &[Encoded],
    choices: &Numbers,
) -> Vec<String> {
    let fields = launcher::fields(kernel);
    let mut given = choices.clone();
    let is_map = |field: &Field<'_>| field.row["type"] == "CUtensorMap";
    for field in fields
        .iter()
        .filter(|it| !is_map(it) && it.row["value"].is_null())
    {
        given.insert(field.name.clone(), value(field, &recorded.parameters));
    }
    let launch = launch(kernel, &given);
    let mut wrong = Vec::new();
    let mut expect = |what: &str, described: &dyn std::fmt::Debug, made: &dyn std::fmt::Debug| {
        let [described, made] = [described, made].map(|it| format!("{it:?}"));
        if described != made {
            wrong.push(format!("{what}: described {described}, launched {made}"));
        }
    };
    expect("grid", &launch.grid, &recorded.grid);
    expect("block", &launch.block, &recorded.block);
    expect("cluster", &launch.cluster, &recorded.cluster);
    expect("dynamic_shared", &launch.shared, &recorded.shared);
    expect("dependent_launch", &launch.dependent, &recorded.dependent);
    let of_launch: BTreeMap<_, _> = launch
        .maps
        .iter()
        .map(|it| ((it.parameter, it.offset), it))
        .collect();
    for field in &fields {
        if !is_map(field) {
            let [described, made] =
                [&launch.parameters, &recorded.parameters].map(|it| value(field, it));
            expect(&field.name, &described, &made);
            continue;
        }
        let made = match value(field, &recorded.parameters) {
            0 => None,
            number => Some(&maps[number as usize - 1]),
        };
        let described = of_launch
            .get(&(field.parameter, field.offset))
            .map(|it| Encoded {
                kind: match it.kind.as_str() {
                    "u8" => 0,
                    "f16" => 6,
                    "f32" => 7,
                    "bf16" => 9,
                    other => panic!("no type is called {other:?}"),
                },
                address: it.address as u64,
                extents: it.extents.clone(),
                strides: it.strides.clone(),
                boxes: it.boxes.clone(),
                modes: [
                    number(&it.modes[0]).checked_ilog2().map_or(0, |it| it - 4),
                    number(&it.modes[1]).ilog2() - 5,
                    (it.modes[2] == "nan").into(),
                ],
            });
        expect(&field.name, &described.as_ref(), &made);
    }
    wrong
}

/// Every kernel is described, and the call by which a caller finds its description has no other.
#[test]
fn each_kernel_has_a_description_of_its_own() {
    let mut calls = BTreeMap::new();
    for (entry, described) in &*described::ALL {
        let launch = &described.kernel["launch"];
        assert!(!launch.is_null(), "{} has no row", described.kernel["name"]);
        let call = (&described.source, launch["when"].as_str().unwrap());
        assert_eq!(calls.insert(call, entry), None, "{call:?}");
    }
    assert!(!calls.is_empty());
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
            { "name": "by", "type": "f32", "offset": 20, "bytes": 4,
              "value": "inverse(tiles + 1)" },
        ],
        "launch": {
            "choices": { "splits": "CTAs of a cluster" },
            "grid": [
                "2 * (tiles + 1) - tiles * 1", "log2(p.tokens) + exp2(log2(0))",
                "if(p.tokens % 64 == 1, p.tokens // 32 + tiles / 0, 9)",
            ],
            "block": [32, 8, 1], "cluster": ["min(splits, max(2, tiles))", "1", "1"],
            "dynamic_shared": "p.tokens * 4", "dependent_launch": true, "tensor_maps": [],
        },
    });
    let given = numbers([("p.from", 0x0102), ("p.tokens", 65), ("splits", 8)]);
    let expected = launcher::Launch {
        parameters: vec![
            vec![2, 1, 0, 0, 0, 0, 0, 0, 65, 0, 0, 0, 0, 0, 0, 0],
            vec![3, 0, 0, 0],
            0.25f32.to_le_bytes().to_vec(),
        ],
        grid: [5, 8, 2],
        block: [32, 8, 1],
        cluster: [3, 1, 1],
        shared: 260,
        dependent: true,
        maps: Vec::new(),
    };
    assert_eq!(launch(&kernel, &given), expected);
}
