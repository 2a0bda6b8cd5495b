//! Tests of `mla bench` and `mla selftest` with a backend whose output is wrong. Its row reports
//! this, the others do not, and the command exits with 1. The test program itself acts as that
//! `mla` if a variable tells it to.

use std::process::{Command, ExitCode};

use mla_cpu::Cpu;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, StepLimits,
};
use mla_runtime::device::Device;
use mla_runtime::{Error, Result, mla_backend};

/// A backend whose output is always 0, and which makes a plan on the host.
struct Nothing;

#[mla_backend(
    name = "NOTHING",
    sm = "any",
    dtypes = "f16,bf16,f32",
    query_len = "ragged",
    max_query_len = 8,
    plans_on_host = true
)]
impl DecodeBackend for Nothing {
    type Device = Cpu;
    type State = ();
    type Metadata = ();

    fn new(_: &Cpu, _: &LayerConfig) -> Result<Self> {
        Ok(Self)
    }

    fn state(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &Cpu,
        batch: &DecodeBatch<'_, Cpu>,
        (): &mut (),
        (): &mut (),
    ) -> Result<()> {
        let lens = batch.host.map(|[_, lens]| lens.len());
        match lens == Some(batch.block_table.requests()) {
            true => Ok(()),
            false => Err(Error::argument(
                "host lengths",
                format!("{lens:?}"),
                "each request's",
            )),
        }
    }

    unsafe fn decode(
        &self,
        cpu: &Cpu,
        call: DecodeCall<'_, Cpu>,
        (): &mut (),
        (): &(),
    ) -> Result<()> {
        match call.out {
            Output::Plain(out) => cpu.clear(out),
            _ => Ok(()),
        }
    }
}

const AS_MLA: &str = "MLA_BENCH_WRONG_AS_MLA";

fn main() -> ExitCode {
    if std::env::var_os(AS_MLA).is_some() {
        return mla_cli::main();
    }
    let json = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong.json");
    let mla = |arguments: &str| {
        let this = std::env::current_exe().expect("this program has a path");
        Command::new(this)
            .args(arguments.split_whitespace())
            .env(AS_MLA, "1")
            .output()
            .expect("this program starts")
    };
    let toy = "--dims 32x16x8x16 --heads 2 --samples 3 --warm-up 0 --cold-cache off";
    let line = format!(
        "bench 2q1s64 {toy} --backends NOTHING,CPU --json {}",
        json.display()
    );
    let output = mla(&line);
    let stdout = String::from_utf8(output.stdout).expect("the output is text");
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert!(
        stdout.contains("2q1s64 by NOTHING: WRONG: error 1.0e0"),
        "{stdout}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&json).expect("the result was written"))
            .expect("the result is JSON");
    let verdict = |index: usize| {
        (
            report["rows"][index]["impl"].clone(),
            report["rows"][index]["errors"]["pass"].clone(),
        )
    };
    assert_eq!(verdict(0), ("NOTHING".into(), false.into()));
    assert_eq!(verdict(1), ("CPU".into(), true.into()));

    // A wrong row is never the best, however fast it is, and a comparison ignores it.
    let compared = mla(&format!("bench compare {0} {0}", json.display()));
    assert_eq!(compared.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&compared.stdout).contains("WRONG"));
    // A query that is too long for the backend takes the expanded path, as in a layer.
    let long = mla(&format!(
        "bench q16s128_2q1s64 {toy} --measure layer --decode NOTHING"
    ));
    let stdout = String::from_utf8_lossy(&long.stdout);
    let stderr = String::from_utf8_lossy(&long.stderr);
    assert_eq!(long.status.code(), Some(1), "{stdout}{stderr}");
    assert!(
        stdout.contains("q16s128_2q1s64 by NOTHING + CPU: WRONG"),
        "{stdout}"
    );
    let right = mla(&format!("bench 2q1s64 {toy} --backends CPU"));
    assert_eq!(right.status.code(), Some(0));
    // A wrong backend fails the selftest with the words of the conformance tests.
    let selftest = mla("selftest --device cpu --only NOTHING --format json");
    assert_eq!(selftest.status.code(), Some(1));
    let report: serde_json::Value =
        serde_json::from_slice(&selftest.stdout).expect("the selftest is JSON");
    let failure = &report["backends"][0]["topics"][0]["failure"];
    assert_eq!(
        (&report["schema"], &report["pass"], &report["times"]),
        (&1.into(), &false.into(), &serde_json::json!([]))
    );
    assert!(report["environment"]["versions"]["git_commit"].is_string());
    assert!(
        failure
            .as_str()
            .is_some_and(|text| text.contains(", but should be ")),
        "{failure}"
    );
    ExitCode::SUCCESS
}
