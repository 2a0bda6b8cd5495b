//! The adapters' times beside those of Python, which calls the same kernels: case by case, in
//! turns, on one GPU.
//!
//! ```sh
//! python3 -m venv beside beside/bin/pip install torch==2.11.0 numpy flashinfer-python==0.7.2.post1
//! nvidia-cudnn-frontend==1.32.0 MLA_CUDNN=/path/to/torch's/libcudnn.so.9 cargo run --release
//! --package mla-flashinfer \
//!     --features sm90,mla-cudnn/cudnn --example beside_python -- beside/bin/python
//! ```
//!
//! Each line is a case in bf16: a decode of FLASHINFER_MLA, or a causal prefill of FLASHINFER or of
//! CUDNN. Both sides capture runs of the planned attention in a graph and replay it, on the same
//! numbers. Python calls FlashInfer by its wrappers (fa3 beside the feature `sm90`, fa2 beside
//! `sm80` alone; it compiles them first, for some minutes), and cuDNN in two ways: `frontend` is
//! the graph that this adapter builds for ragged requests, `dense` torch's attention of requests of
//! one length, for which cuDNN has another kernel. "Exact" is CUDNN with a plan for each such
//! length, as torch has it. torch's attention of jagged tensors is left out: it builds a plan with
//! each call, for 60 ms. "Same bits" says that both wrote the same output.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use mla_cudnn::{ExactLengths, set_exact_lengths};
use mla_flashinfer::FlashInfer;
use mla_kernels::Cuda;
use mla_kernels::device::Graph;
use mla_kernels::device::cudarc::driver::CudaEvent;
use mla_kernels::device::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use mla_runtime::backend::{
    DecodeBatch, DecodeCall, DecodeStage, HostLens, Keys, Output, PrefillBackend, PrefillBatch,
    PrefillCall, PrefillStage, Query, SelectedDecode, SelectedPrefill,
};
use mla_runtime::prelude::*;
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::{BlockTable, CacheRef};
use serde_json::{Value, json};

/// Runs in one graph, replays in one turn, and turns.
const RUNS: usize = 10;
const SAMPLES: usize = 5;
const ROUNDS: usize = 3;

/// Tokens in a page of the cache.
const PAGE: usize = 64;

type Failure = Box<dyn std::error::Error>;
type Buffer = <Cuda as Memory>::Buffer;

/// A call to time.
struct Case {
    backend: &'static str,
    heads: usize,
    /// Query tokens and keys of each request.
    requests: Vec<[u32; 2]>,
    has_lse: bool,
    /// True if CUDNN has a plan for each length of equal requests.
    is_exact: bool,
}

fn cases() -> Vec<Case> {
    let equal = |requests: usize, queries, keys| vec![[queries, keys]; requests];
    let own = |lens: &[u32]| lens.iter().map(|len| [*len, *len]).collect();
    let mixed = (0..32).map(|n| [1, 100 + 250 * n]).collect();
    let ragged = own(&[700, 3000, 96, 1300, 2100]);
    let decodes = [
        (128, equal(1, 1, 32_768)),
        (16, equal(1, 1, 8192)),
        (128, equal(32, 1, 4096)),
        (16, equal(128, 1, 4096)),
        (128, equal(64, 2, 8192)),
        (64, mixed),
    ];
    let prefills = [
        (128, equal(1, 2048, 2048)),
        (128, equal(1, 8192, 8192)),
        (128, equal(16, 512, 512)),
        (16, equal(4, 2048, 2048)),
        (128, ragged),
        (128, equal(1, 3000, 3000)),
        (128, equal(1, 3072, 3072)),
        (128, equal(16, 400, 400)),
    ];
    let mut cases = Vec::new();
    let mut add = |backend, (heads, requests): &(usize, Vec<[u32; 2]>), has_lse| {
        cases.push(Case {
            backend,
            heads: *heads,
            requests: requests.clone(),
            has_lse,
            is_exact: false,
        });
    };
    for has_lse in [false, true] {
        decodes
            .iter()
            .for_each(|case| add("FLASHINFER_MLA", case, has_lse));
        prefills[..5]
            .iter()
            .for_each(|case| add("FLASHINFER", case, has_lse));
    }
    // torch writes no log-sum-exp.
    prefills.iter().for_each(|case| add("CUDNN", case, false));
    cases.extend(
        [(128, equal(1, 3000, 3000)), (128, equal(16, 400, 400))].map(|(heads, requests)| Case {
            backend: "CUDNN",
            heads,
            requests,
            has_lse: false,
            is_exact: true,
        }),
    );
    cases
}

impl Case {
    fn queries(&self) -> Vec<u32> {
        self.requests.iter().map(|[queries, _]| *queries).collect()
    }

    fn keys(&self) -> Vec<u32> {
        self.requests.iter().map(|[_, keys]| *keys).collect()
    }

    fn name(&self) -> String {
        let mut lens = String::new();
        for run in self.requests.chunk_by(|a, b| a == b) {
            let [queries, keys] = run[0];
            lens += &format!(" {}×{queries}", run.len());
            if keys != queries {
                lens += &format!("/{keys}");
            }
            if lens.len() > 40 {
                lens += " …";
                break;
            }
        }
        let lse = if self.has_lse { ", lse" } else { "" };
        let exact = if self.is_exact { ", exact" } else { "" };
        format!("{} h{}{lens}{lse}{exact}", self.backend, self.heads)
    }
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let mut python = Python::start(&arguments.next().unwrap_or("python3".to_owned()))?;
    let only = arguments.next().unwrap_or_default();
    let device = Cuda::new(0)?;
    let version = match FlashInfer::KERNELS.family_on(device.gpu().capability) {
        Some(family) if family.name == "sm90" => "fa3",
        _ => "fa2",
    };
    println!(
        "{}, {version}: microseconds of ours and of Python's ways",
        device.gpu().name
    );
    for case in cases().iter().filter(|case| case.name().starts_with(&only)) {
        let beside = Beside::of(&device, case, version, &mut python)
            .map_err(|error| format!("{}: {error}", case.name()))?;
        println!("{}", beside.line(&case.name()));
    }
    python.end()
}

/// The script at work.
struct Python {
    child: Child,
    ask: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Python {
    fn start(program: &str) -> Result<Self, Failure> {
        let mut child = Command::new(program)
            .args(["-c", include_str!("beside_python.py")])
            .args([RUNS.to_string(), SAMPLES.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let ask = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Ok(Self {
            child,
            ask,
            answers,
        })
    }

    fn times(&mut self, case: &Case, version: &str) -> Result<Value, Failure> {
        let question = json!({
            "backend": case.backend, "version": version, "heads": case.heads, "lse": case.has_lse,
            "queries": case.queries(), "keys": case.keys(),
        });
        writeln!(self.ask, "{question}")?;
        let answer = self.answers.next().ok_or("Python ended")??;
        Ok(serde_json::from_str(&answer)?)
    }

    fn end(mut self) -> Result<(), Failure> {
        drop(self.ask);
        self.child.wait()?;
        Ok(())
    }
}

/// Times of one case.
struct Beside {
    ours: Vec<f64>,
    bits: u64,
    first: f64,
    /// The name of each of Python's ways, its times, and the sum of its output's bits.
    theirs: Vec<(String, Vec<f64>, u64)>,
    refused: Vec<String>,
}

impl Beside {
    fn of(device: &Cuda, case: &Case, version: &str, python: &mut Python) -> Result<Self, Failure> {
        let ours = Ours::new(device, case)?;
        let mut beside = Self {
            ours: Vec::new(),
            bits: ours.bits,
            first: ours.first,
            theirs: Vec::new(),
            refused: Vec::new(),
        };
        // The first turn makes Python's plans and graphs and warms the GPU: it is not counted.
        for round in 0..=ROUNDS {
            let times = ours.times(device)?;
            let answer = python.times(case, version)?;
            if round == 0 {
                let refused = answer["refused"].as_object().into_iter().flatten();
                beside.refused = refused.map(|(way, why)| format!("{way}: {why}")).collect();
                continue;
            }
            beside.ours.extend(times);
            for (way, said) in answer["timed"].as_object().into_iter().flatten() {
                let times = said["times"].as_array().into_iter().flatten();
                let times = times.filter_map(Value::as_f64);
                match beside.theirs.iter_mut().find(|(known, ..)| known == way) {
                    Some((_, known, _)) => known.extend(times),
                    None => {
                        let bits = said["bits"].as_u64().unwrap_or(0);
                        beside.theirs.push((way.clone(), times.collect(), bits));
                    }
                }
            }
        }
        Ok(beside)
    }

    fn line(&self, name: &str) -> String {
        let ours = median(&self.ours);
        let mut line = format!("{name}: {ours:.1} (first {:.1} ms)", self.first);
        for (way, times, bits) in &self.theirs {
            let theirs = median(times);
            let same = if *bits == self.bits {
                ", same bits"
            } else {
                ""
            };
            line += &format!(
                "; {way} {theirs:.1} (ours {:.3} of it{same})",
                ours / theirs
            );
        }
        for refused in &self.refused {
            line += &format!("; not {refused}");
        }
        line
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Our runs, captured once.
struct Ours {
    graph: Graph,
    /// The sum of the output's bits, 16 at a time.
    bits: u64,
    /// Milliseconds that the first run took, which loads kernels and builds plans.
    first: f64,
    /// Tensors that the graph reads and writes.
    _work: Work,
}

enum Work {
    Decode(Box<Decode>),
    Prefill(Box<Prefill>),
}

impl Ours {
    fn new(device: &Cuda, case: &Case) -> Result<Self, Failure> {
        let mut work = match case.backend {
            "FLASHINFER_MLA" => Work::Decode(Box::new(Decode::new(device, case)?)),
            _ => Work::Prefill(Box::new(Prefill::new(device, case)?)),
        };
        device.synchronize()?;
        let begin = Instant::now();
        work.run(device)?;
        device.synchronize()?;
        let first = begin.elapsed().as_secs_f64() * 1e3;
        let mut bytes = vec![0; work.out().len()];
        device.download(Cuda::bytes(work.out()), &mut bytes)?;
        let words = bytes
            .chunks_exact(2)
            .map(|word| u16::from_le_bytes([word[0], word[1]]));
        let graph = device.capture(|device| (0..RUNS).try_for_each(|_| work.run(device)))?;
        graph.upload()?;
        Ok(Self {
            graph,
            bits: words.map(u64::from).sum(),
            first,
            _work: work,
        })
    }

    /// Returns the microseconds of each replay.
    fn times(&self, device: &Cuda) -> Result<Vec<f64>, Failure> {
        let event = || device.stream().record_event(Some(CU_EVENT_DEFAULT));
        let mut events: Vec<[CudaEvent; 2]> = Vec::new();
        for _ in 0..SAMPLES {
            let start = event()?;
            // SAFETY: what was captured belongs to `_work`, and nothing else uses it.
            unsafe { self.graph.replay()? };
            events.push([start, event()?]);
        }
        device.synchronize()?;
        let micros = |[start, end]: &[CudaEvent; 2]| -> Result<f64, Failure> {
            Ok(f64::from(start.elapsed_ms(end)?) * 1e3 / RUNS as f64)
        };
        events.iter().map(micros).collect()
    }
}

impl Work {
    fn run(&mut self, device: &Cuda) -> mla_runtime::Result<()> {
        match self {
            Self::Decode(work) => work.run(device),
            Self::Prefill(work) => work.run(device),
        }
    }

    fn out(&self) -> &Buffer {
        match self {
            Self::Decode(work) => &work.out,
            Self::Prefill(work) => &work.out,
        }
    }
}

/// A step of absorbed attention.
struct Decode {
    backend: SelectedDecode<Cuda>,
    state: <SelectedDecode<Cuda> as DecodeStage>::State,
    plan: <SelectedDecode<Cuda> as DecodeStage>::Metadata,
    shape: [usize; 3],
    max_pages: usize,
    longest: [usize; 2],
    cache_layout: CacheLayout,
    latent: Buffer,
    rope: Buffer,
    cache: Buffer,
    lens: Buffer,
    starts: Buffer,
    table: Buffer,
    out: Buffer,
    lse: Option<Buffer>,
}

impl Decode {
    fn new(device: &Cuda, case: &Case) -> Result<Self, Failure> {
        let (queries, keys) = (case.queries(), case.keys());
        let (requests, tokens) = (queries.len(), total(&queries));
        let pages: Vec<usize> = keys
            .iter()
            .map(|len| (*len as usize).div_ceil(PAGE))
            .collect();
        let max_pages = pages.iter().copied().max().unwrap_or(1);
        let problem = Problem::new(MlaDims::R1, case.heads as u32, DType::BF16)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Uniform);
        let config = LayerConfig::new(problem, SCALE);
        let longest = longest(case);
        let limits = StepLimits::new(requests, tokens, max_pages).with_decode_query_len(longest[0]);
        let backend = Registry::linked()?.instantiate_decode(case.backend, device, &config)?;
        let mut table = Vec::new();
        let mut first = 0;
        for count in &pages {
            table.extend((first..first + count).map(|page| page as i32));
            table.resize(table.len().next_multiple_of(max_pages), -1);
            first += count;
        }
        let lens: Vec<i32> = keys.iter().map(|len| *len as i32).collect();
        let mut work = Self {
            state: backend.state(device, &limits)?,
            plan: backend.metadata(device, &limits)?,
            backend,
            shape: [requests, tokens, case.heads],
            max_pages,
            longest,
            cache_layout: CacheLayout::contiguous(MlaDims::R1, KvFormat::BF16, first, PAGE),
            latent: numbers(device, 1000, tokens * case.heads * 512)?,
            rope: numbers(device, 2000, tokens * case.heads * 64)?,
            cache: numbers(device, 0, first * PAGE * 576)?,
            lens: integers(device, &lens)?,
            starts: integers(device, &starts(&queries))?,
            table: integers(device, &table)?,
            out: device.allocate(tokens * case.heads * 512 * 2)?,
            lse: lse(device, case)?,
        };
        let table = ArrayRef::new(Cuda::bytes(&work.table), requests * max_pages)?;
        let batch = DecodeBatch::new(
            BlockTable::new(table, requests, max_pages)?,
            (
                ArrayRef::new(Cuda::bytes(&work.lens), requests)?,
                longest[1],
            ),
            (
                ArrayRef::new(Cuda::bytes(&work.starts), requests + 1)?,
                longest[0],
            ),
        )
        .with_host(HostLens::new(&queries, &keys));
        work.backend
            .prepare(device, &batch, &mut work.state, &mut work.plan)?;
        Ok(work)
    }

    fn run(&mut self, device: &Cuda) -> mla_runtime::Result<()> {
        let [requests, tokens, heads] = self.shape;
        let layout = |width| Layout::contiguous(DType::BF16, [tokens, heads, width]);
        let table = ArrayRef::new(Cuda::bytes(&self.table), requests * self.max_pages)?;
        let batch = DecodeBatch::new(
            BlockTable::new(table, requests, self.max_pages)?,
            (
                ArrayRef::new(Cuda::bytes(&self.lens), requests)?,
                self.longest[1],
            ),
            (
                ArrayRef::new(Cuda::bytes(&self.starts), requests + 1)?,
                self.longest[0],
            ),
        );
        let call = DecodeCall::new(
            Query::Split {
                latent: TensorRef::new(Cuda::bytes(&self.latent), layout(512))?,
                rope: TensorRef::new(Cuda::bytes(&self.rope), layout(64))?,
            },
            CacheRef::new(Cuda::bytes(&self.cache), self.cache_layout)?,
            batch,
            Output::Plain(TensorMut::new(Cuda::bytes_mut(&mut self.out), layout(512))?),
        )
        .with_lse(lse_view(&mut self.lse, heads, tokens)?);
        // SAFETY: lengths, starts and pages are those of the case, for which every tensor was made
        // and the plan prepared.
        unsafe {
            self.backend
                .decode(device, call, &mut self.state, &self.plan)
        }
    }
}

/// A step of expanded attention of new tokens.
struct Prefill {
    backend: SelectedPrefill<Cuda>,
    state: <SelectedPrefill<Cuda> as PrefillStage>::State,
    plan: <SelectedPrefill<Cuda> as PrefillStage>::Metadata,
    shape: [usize; 3],
    longest: usize,
    query: Buffer,
    keys: Buffer,
    values: Buffer,
    starts: Buffer,
    out: Buffer,
    lse: Option<Buffer>,
}

impl Prefill {
    fn new(device: &Cuda, case: &Case) -> Result<Self, Failure> {
        let lens = case.queries();
        let (requests, tokens) = (lens.len(), total(&lens));
        let problem = Problem::new(MlaDims::R1, case.heads as u32, DType::BF16);
        let config = LayerConfig::new(problem, SCALE);
        let limits = StepLimits::new(requests, tokens, 0);
        set_exact_lengths(if case.is_exact {
            ExactLengths::All
        } else {
            ExactLengths::default()
        });
        let backend = Registry::linked()?.instantiate_prefill(case.backend, device, &config)?;
        let mut state = backend.state(device, &limits)?;
        let mut plan = backend.metadata(device, &limits)?;
        let batch = PrefillBatch::new(&lens, &lens);
        backend.prepare(device, &batch, &mut state, &mut plan)?;
        let columns = tokens * case.heads;
        Ok(Self {
            backend,
            state,
            plan,
            shape: [requests, tokens, case.heads],
            longest: longest(case)[0],
            query: numbers(device, 0, columns * 192)?,
            keys: numbers(device, 1000, columns * 192)?,
            values: numbers(device, 2000, columns * 128)?,
            starts: integers(device, &starts(&lens))?,
            out: device.allocate(columns * 128 * 2)?,
            lse: lse(device, case)?,
        })
    }

    fn run(&mut self, device: &Cuda) -> mla_runtime::Result<()> {
        let [requests, tokens, heads] = self.shape;
        let layout = |width| Layout::contiguous(DType::BF16, [tokens, heads, width]);
        let starts = || ArrayRef::new(Cuda::bytes(&self.starts), requests + 1);
        let call = PrefillCall::new(
            TensorRef::new(Cuda::bytes(&self.query), layout(192))?,
            Keys::Packed(TensorRef::new(Cuda::bytes(&self.keys), layout(192))?),
            TensorRef::new(Cuda::bytes(&self.values), layout(128))?,
            Output::Plain(TensorMut::new(Cuda::bytes_mut(&mut self.out), layout(128))?),
            (starts()?, self.longest),
            (starts()?, self.longest),
        )
        .with_lse(lse_view(&mut self.lse, heads, tokens)?);
        // SAFETY: the starts are those of the case, for which every tensor was made and the plan
        // prepared.
        unsafe {
            self.backend
                .prefill(device, call, &mut self.state, &self.plan)
        }
    }
}

/// 1 / √192.
const SCALE: f32 = 0.072_168_78;

fn total(lens: &[u32]) -> usize {
    lens.iter().map(|len| *len as usize).sum()
}

/// Returns the maximum number of query tokens and of keys of a request.
fn longest(case: &Case) -> [usize; 2] {
    [0, 1].map(|of| case.requests.iter().map(|lens| lens[of]).max().unwrap_or(0) as usize)
}

fn starts(lens: &[u32]) -> Vec<i32> {
    let mut starts = vec![0];
    for len in lens {
        starts.push(starts[starts.len() - 1] + *len as i32);
    }
    starts
}

fn lse(device: &Cuda, case: &Case) -> mla_runtime::Result<Option<Buffer>> {
    let bytes = total(&case.queries()) * case.heads * 4;
    case.has_lse.then(|| device.allocate(bytes)).transpose()
}

fn lse_view(
    lse: &mut Option<Buffer>,
    heads: usize,
    tokens: usize,
) -> mla_runtime::Result<Option<LseMut<'_, Cuda>>> {
    let layout = LseLayout::heads_first(heads, tokens);
    lse.as_mut()
        .map(|lse| LseMut::new(Cuda::bytes_mut(lse), layout))
        .transpose()
}

fn integers(device: &Cuda, numbers: &[i32]) -> mla_runtime::Result<Buffer> {
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect();
    upload(device, &bytes)
}

/// Makes `count` of the numbers that Python makes too, from the `first` on: signs, exponents of 2⁻¹
/// and 2⁰, and mantissas. They repeat, because a short sequence is quickly made.
fn numbers(device: &Cuda, first: usize, count: usize) -> mla_runtime::Result<Buffer> {
    let mut state = 1u64;
    let mut made: Vec<[u8; 2]> = (0..1 << 16)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let bits = (state >> 48) as u16;
            ((0x3f00 + (bits & 0x00ff)) | (bits & 0x8000)).to_le_bytes()
        })
        .collect();
    made.rotate_left(first);
    let mut bytes = made.concat().repeat(count.div_ceil(made.len()));
    bytes.truncate(count * 2);
    upload(device, &bytes)
}

fn upload(device: &Cuda, bytes: &[u8]) -> mla_runtime::Result<Buffer> {
    let mut buffer = device.allocate(bytes.len())?;
    device.upload(bytes, Cuda::bytes_mut(&mut buffer))?;
    Ok(buffer)
}
