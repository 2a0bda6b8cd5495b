//! Compiles the kernels through Cargo and shows what Cargo hides: the progress of the build script.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use mla_build::{
    progress::{self, Event},
    report::{self, Report, size},
};

use crate::Workspace;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The features of the architectures to compile for.
    #[arg(long, value_delimiter = ',', default_value = "sm90")]
    pub(crate) features: Vec<String>,
    /// Compile everything again, into a temporary cache.
    #[arg(long)]
    cold: bool,
    /// Write compile_commands.json for clangd into the workspace's folder.
    #[arg(long)]
    compile_commands: bool,
    /// Number of units in the summary.
    #[arg(long, default_value_t = 10)]
    top: usize,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let folder = tempfile::tempdir()?;
    let events = folder.path().join("events");
    File::create(&events)?;

    let mut cargo = workspace.cargo();
    cargo
        .args(["build", "--quiet", "--package", "mla-kernels", "--features"])
        .arg(arguments.features.join(","))
        .env(progress::VARIABLE, &events)
        // An error is shown at once, and the other units are still compiled.
        .env("MLA_BUILD_KEEP_GOING", "1")
        .stdin(Stdio::null());
    if arguments.cold {
        cargo.env("MLA_BUILD_CACHE", folder.path().join("cache"));
    }
    if arguments.compile_commands {
        cargo.env(
            "MLA_BUILD_COMPILE_COMMANDS",
            workspace.root.join("compile_commands.json"),
        );
    }
    let started = Instant::now();
    let mut build = cargo.spawn().context("cargo does not start")?;
    let mut events_reader = EventReader::new(events)?;
    let status = loop {
        let status = build.try_wait()?;
        events_reader.show()?;
        match status {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let ran = events_reader.finish();
    if !status.success() {
        bail!("the build failed; cargo's message stands above");
    }
    let report = report::newest(&workspace.build)?;
    if !ran {
        println!("nothing to build; of the last build:");
    }
    println!("{}", summary(&report, arguments.top));
    println!(
        "{:.1} s with Cargo's own; the whole report: cargo mla build-report",
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Shows the events that the build script appends to a file.
struct EventReader {
    lines: BufReader<File>,
    partial: String,
    bar: Option<ProgressBar>,
}

impl EventReader {
    fn new(path: PathBuf) -> anyhow::Result<Self> {
        Ok(Self {
            lines: BufReader::new(File::open(path)?),
            partial: String::new(),
            bar: None,
        })
    }

    fn show(&mut self) -> anyhow::Result<()> {
        // A line may be read while it is being written. Its rest is read in the next call.
        while self.lines.read_line(&mut self.partial)? > 0 && self.partial.ends_with('\n') {
            let event = serde_json::from_str(&self.partial)
                .context("the build script speaks another version")?;
            self.partial.clear();
            self.tell(&event);
        }
        Ok(())
    }

    fn tell(&mut self, event: &Event) {
        if let Event::Planned { units, cached, .. } = event {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(*units as u64).with_style(style);
            bar.set_position(*cached as u64);
            bar.enable_steady_tick(Duration::from_millis(500));
            self.bar = Some(bar);
        }
        let Some(bar) = &self.bar else { return };
        match event {
            Event::Started { unit, .. } => bar.set_message(unit.clone()),
            Event::Finished { .. } => bar.inc(1),
            _ => {}
        }
        // On a terminal the line is shown above the bar. Otherwise it is a plain line.
        let line = progress::sentence(event);
        if bar.is_hidden() {
            eprintln!("{line}")
        } else {
            bar.println(line)
        }
    }

    /// Removes the bar. Returns true if the build script ran at all.
    fn finish(self) -> bool {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.bar.is_some()
    }
}

/// Lists the slowest units, with the slowest first.
fn summary(report: &Report, top: usize) -> String {
    let mut units: Vec<_> = report.units.iter().collect();
    units.sort_by(|a, b| b.compile_seconds.total_cmp(&a.compile_seconds));
    let total = report.compile_seconds();
    let percent = |seconds: f64| 100.0 * seconds / total.max(f64::MIN_POSITIVE);
    let mut lines = Vec::new();
    for unit in units.iter().take(top) {
        lines.push(format!(
            "{:>6.1} s {:>4.0}%  {:>9}  {} ({})",
            unit.compile_seconds,
            percent(unit.compile_seconds),
            size(unit.peak),
            unit.source,
            unit.targets.join(", ")
        ));
    }
    if let Some(rest) = units.get(top..).filter(|rest| !rest.is_empty()) {
        let seconds: f64 = rest.iter().map(|unit| unit.compile_seconds).sum();
        lines.push(format!(
            "{seconds:>6.1} s {:>4.0}%  {:>9}  {} more",
            percent(seconds),
            "",
            rest.len()
        ));
    }
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    lines.push(format!(
        "{total:.1} s of compilers in all; the build took {:.1} s; library {}; the {jobs} largest \
         units at once need {}",
        report.seconds,
        size(report.library_bytes),
        size(report.peak_of_largest(jobs)),
    ));
    lines.join("\n")
}
