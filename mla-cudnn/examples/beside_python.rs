//! CUDNN's time beside that of Python, which calls the same library: case by case, in turns, on one
//! GPU.
//!
//! ```sh
//! python3 -m pip install nvidia-cudnn-frontend==1.32.0
//! MLA_CUDNN=/path/to/torch's/libcudnn.so.9 \
//!     cargo run --release --package mla-cudnn --features cudnn --example beside_python -- python3
//! ```
//!
//! Each line is a case: causal attention of requests of equal length to their own tokens, 192/128,
//! bf16. Python is timed twice: with the frontend's graph of a ragged batch, and with torch's
//! attention of a dense batch, for which cuDNN has another kernel. This adapter gives cuDNN a dense
//! batch if the length is a power of two, and a ragged one otherwise.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use mla_cudnn::Cudnn;
use mla_kernels::Cuda;
use mla_kernels::device::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use mla_runtime::backend::{Keys, Output, PrefillBackend, PrefillBatch, PrefillCall};
use mla_runtime::prelude::*;

/// Requests, their tokens, and heads.
const CASES: &[[usize; 3]] = &[
    [1, 2048, 128],
    [1, 8192, 128],
    [16, 512, 128],
    [4, 2048, 16],
    [1, 3000, 128],
    [16, 400, 128],
];

/// Runs in one sample, and samples in each of the rounds.
const RUNS: usize = 10;
const SAMPLES: usize = 7;
const ROUNDS: usize = 3;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let python = std::env::args().nth(1).unwrap_or("python3".to_owned());
    let mut beside = Command::new(python)
        .args(["-c", include_str!("beside_python.py")])
        .args([RUNS.to_string(), SAMPLES.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ask = beside.stdin.take().expect("a pipe");
    let mut answers = BufReader::new(beside.stdout.take().expect("a pipe")).lines();
    let device = Cuda::new(0)?;
    println!("requests tokens heads: microseconds of CUDNN, the frontend, torch; ratios");
    for case in CASES {
        let mut ours = Ours::new(&device, *case)?;
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        // The first makes plans and graphs, and warms the GPU: it is not counted.
        for round in 0..=ROUNDS {
            if round == 1 {
                times.iter_mut().for_each(Vec::clear);
            }
            times[0].extend(ours.time(&device)?);
            let [requests, tokens, heads] = case;
            writeln!(ask, "{requests} {tokens} {heads}")?;
            let answer = answers.next().ok_or("Python ended")??;
            for (times, said) in times[1..].iter_mut().zip(answer.split(';')) {
                let said: Result<Vec<f64>, _> = said.split_whitespace().map(str::parse).collect();
                times.extend(said?);
            }
        }
        let [ours, frontend, torch] = times.map(median);
        let [requests, tokens, heads] = case;
        println!(
            "{requests} {tokens} {heads}: {ours:.1}, {frontend:.1}, {torch:.1}; {:.3}, {:.3}",
            ours / frontend,
            ours / torch
        );
    }
    drop(ask);
    beside.wait()?;
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A call of CUDNN's.
struct Ours {
    backend: Cudnn,
    state: <Cudnn as PrefillBackend>::State,
    shape: [usize; 2],
    lens: Vec<usize>,
    query: <Cuda as Memory>::Buffer,
    keys: <Cuda as Memory>::Buffer,
    values: <Cuda as Memory>::Buffer,
    out: <Cuda as Memory>::Buffer,
    starts: <Cuda as Memory>::Buffer,
}

impl Ours {
    fn new(device: &Cuda, [requests, len, heads]: [usize; 3]) -> Result<Self, Failure> {
        let tokens = requests * len;
        let problem = Problem::new(MlaDims::R1, heads as u32, DType::BF16);
        let config = LayerConfig::new(problem, 1.0 / 192f32.sqrt());
        let limits = StepLimits::new(requests, tokens, 0);
        let backend = Cudnn::new(device, &config)?;
        let mut state = backend.state(device, &limits)?;
        let lens = vec![len as u32; requests];
        let batch = PrefillBatch::new(&lens, &lens);
        backend.prepare(device, &batch, &mut state, &mut ())?;
        // Numbers that repeat: so many are quickly made.
        let mut state_of_numbers = 1u64;
        let numbers: Vec<u8> = (0..1 << 16)
            .flat_map(|_| {
                state_of_numbers = state_of_numbers
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                // A sign, an exponent of 2^-7 or a bit above, and a mantissa.
                let bits = (state_of_numbers >> 48) as u16;
                ((0x3c00 + (bits & 0x03ff)) | (bits & 0x8000)).to_le_bytes()
            })
            .collect();
        let random = |width: usize| {
            let bytes = tokens * heads * width * 2;
            let mut repeated = numbers.repeat(bytes.div_ceil(numbers.len()));
            repeated.truncate(bytes);
            upload(device, &repeated)
        };
        let starts: Vec<u8> = (0..=requests)
            .flat_map(|request| ((request * len) as i32).to_le_bytes())
            .collect();
        Ok(Self {
            backend,
            state,
            shape: [tokens, heads],
            lens: vec![len; requests],
            query: random(192)?,
            keys: random(192)?,
            values: random(128)?,
            out: device.allocate(tokens * heads * 256)?,
            starts: upload(device, &starts)?,
        })
    }

    fn run(&mut self, device: &Cuda) -> mla_runtime::Result<()> {
        let [tokens, heads] = self.shape;
        let layout = |width| Layout::contiguous(DType::BF16, [tokens, heads, width]);
        let starts = || ArrayRef::new(Cuda::bytes(&self.starts), self.lens.len() + 1);
        // Without a log-sum-exp: torch writes none either.
        let call = PrefillCall::new(
            TensorRef::new(Cuda::bytes(&self.query), layout(192))?,
            Keys::Packed(TensorRef::new(Cuda::bytes(&self.keys), layout(192))?),
            TensorRef::new(Cuda::bytes(&self.values), layout(128))?,
            Output::Plain(TensorMut::new(Cuda::bytes_mut(&mut self.out), layout(128))?),
            (starts()?, self.lens[0]),
            (starts()?, self.lens[0]),
        );
        self.backend.prefill(device, call, &mut self.state, &())
    }

    /// Microseconds of a run, in each sample.
    fn time(&mut self, device: &Cuda) -> Result<Vec<f64>, Failure> {
        let event = || device.stream().record_event(Some(CU_EVENT_DEFAULT));
        // The first builds the plan.
        self.run(device)?;
        let mut events = Vec::new();
        for _ in 0..SAMPLES {
            let start = event()?;
            for _ in 0..RUNS {
                self.run(device)?;
            }
            events.push((start, event()?));
        }
        device.synchronize()?;
        let micros = |(start, end): &(_, _)| -> Result<f64, Failure> {
            let start: &mla_kernels::device::cudarc::driver::CudaEvent = start;
            Ok(f64::from(start.elapsed_ms(end)?) * 1e3 / RUNS as f64)
        };
        events.iter().map(micros).collect()
    }
}

fn upload(device: &Cuda, bytes: &[u8]) -> mla_runtime::Result<<Cuda as Memory>::Buffer> {
    let mut buffer = device.allocate(bytes.len())?;
    device.upload(bytes, Cuda::bytes_mut(&mut buffer))?;
    Ok(buffer)
}
