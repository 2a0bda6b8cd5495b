//! Checks the log of a selection: one line when a program starts, and on request every candidate.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use mla_cpu::{CpuDecode, CpuPrefill};
use mla_runtime::backend::{DecodeBackend, PrefillBackend};
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Problem, Target};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

type Lines = Arc<Mutex<Vec<(Level, String)>>>;

/// A subscriber that keeps all log lines.
struct Log(Lines);

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            assert_eq!(field.name(), "message");
            message = format!("{value:?}");
        });
        let level = *event.metadata().level();
        self.0.lock().unwrap().push((level, message));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn selection_logs_one_line() {
    let mut registry = Registry::known();
    registry.add(CpuPrefill::ENTRY).unwrap();
    registry.add(CpuDecode::ENTRY).unwrap();
    let problem = Problem::new(MlaDims::R1, 16, DType::BF16);
    let lines = Lines::default();
    tracing::subscriber::with_default(Log(lines.clone()), || {
        registry
            .select(&SelectionRequest::new(Target::CPU, problem))
            .unwrap();
    });
    let lines = lines.lock().unwrap();
    let [(info, short), (debug, long)] = &lines[..] else {
        panic!("{lines:?}");
    };
    assert_eq!((*info, *debug), (Level::INFO, Level::DEBUG));
    assert_eq!(
        short,
        "attention on cpu: CPU and CPU, bf16 cache in pages of 64"
    );
    assert!(long.lines().count() > 10, "{long}");
}
