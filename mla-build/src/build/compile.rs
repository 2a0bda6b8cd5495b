//! Each unit: from the cache, or from the compiler into it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use super::{Done, Plan};
use crate::{
    Error, bounded,
    cache::{DependencySet, Entry, Estimate, Hasher, Key, Loaded, Meta, content_now, last_change},
    compiler, depfile,
    diagnostic::{self, FailedUnit},
    process::Finished,
    progress::{Event, Progress},
    report::Outcome,
    schedule::{self, Job, Limits},
    unit::{Language, Unit},
    workshop::Workshop,
};

/// The state that all compilations of a build share.
struct Shared<'a> {
    /// Files that changed since are not trusted.
    trusted: SystemTime,
    hasher: &'a Hasher,
    progress: &'a Progress,
    workshop: &'a Workshop,
    /// The file of [`Compiler::path_maps`](crate::compiler::Compiler::path_maps).
    maps: &'a Path,
    /// Set when a unit has failed and the others are not to be compiled.
    is_stopped: AtomicBool,
}

impl Shared<'_> {
    /// Ends the compilers of the other units that still run, also one that starts at this moment,
    /// if the build stops at the first error. Returns true if it does.
    fn is_stopped(&self) -> bool {
        let is_stopped = self.is_stopped.load(Ordering::SeqCst);
        if is_stopped {
            self.workshop.stop();
        }
        is_stopped
    }
}

impl Plan {
    pub(super) fn compile_units(
        &self,
        limits: &Limits,
        progress: &Progress,
    ) -> Result<Vec<Done>, Error> {
        // Files that change from here on are not trusted, and the clock of a file system may be
        // late by one tick of the kernel.
        let trusted = SystemTime::now();
        thread::sleep(Duration::from_millis(10));
        let hasher = Hasher::default();

        let mut done = Vec::new();
        let mut jobs = Vec::new();
        for (index, unit) in self.sources.units.iter().enumerate() {
            let first = self.first_key(unit, &hasher)?;
            match self.look_up(first, &hasher) {
                Ok((entry, files)) => {
                    done.push(self.take(index, entry, files, Outcome::Cached, String::new()));
                }
                Err(reason) => {
                    let (estimate, kin) = self.expected(unit);
                    jobs.push(Job {
                        work: (index, first, reason),
                        memory: estimate.peak,
                        kin,
                        seconds: estimate.seconds,
                    });
                }
            }
        }
        progress.tell(&Event::Planned {
            package: self.package.clone(),
            units: self.sources.units.len(),
            cached: done.len(),
        });
        if !jobs.is_empty() {
            let workshop = Workshop::open(&self.place.out_dir)?;
            let maps = workshop.path().join("maps");
            fs::write(&maps, self.tools.compiler.path_maps())
                .map_err(Error::file("write", &maps))?;
            let shared = Shared {
                trusted,
                hasher: &hasher,
                progress,
                workshop: &workshop,
                maps: &maps,
                is_stopped: AtomicBool::new(false),
            };
            done.extend(self.compile_jobs(jobs, limits, &shared)?);
        }
        // The first failure stays first.
        done.sort_by_key(|done| {
            (
                done.failure.is_none(),
                done.failure.is_none().then_some(done.index),
            )
        });
        match done.iter_mut().find_map(|done| done.error.take()) {
            Some(error) => Err(error),
            None => Ok(done),
        }
    }

    fn compile_jobs(
        &self,
        jobs: Vec<Job<(usize, Key, String)>>,
        limits: &Limits,
        shared: &Shared<'_>,
    ) -> Result<Vec<Done>, Error> {
        let compile = |(index, first, reason): (usize, Key, String), is_alone: bool| {
            let started = Instant::now();
            let mut done = self.compile_unit(index, first, reason.clone(), shared);
            let peak = done.entry.as_ref().map_or(0, |entry| entry.meta.peak);
            if done.is_starved && !is_alone {
                done.again = Some((index, first, reason));
                shared.progress.tell(&Event::Noted {
                    text: format!(
                        "{} ran out of memory; it is compiled once more, alone",
                        self.sources.units[index]
                    ),
                });
                return schedule::Done { result: done, peak };
            }
            if !self.keep_going && (done.failure.is_some() || done.error.is_some()) {
                shared.is_stopped.store(true, Ordering::SeqCst);
            }
            shared.progress.tell(&Event::Finished {
                unit: self.sources.units[index].to_string(),
                outcome: done.outcome,
                seconds: started.elapsed().as_secs_f64(),
                peak,
                error: done
                    .failure
                    .as_ref()
                    .map(|failure| failure.first_error.clone())
                    .or_else(|| done.error.as_ref().map(ToString::to_string)),
            });
            schedule::Done { result: done, peak }
        };
        let token = || Error::file("take a token of the jobserver for", &self.place.out_dir);
        let is_stopped = || shared.is_stopped();
        let compiled = schedule::run(jobs, limits, is_stopped, |work| compile(work, false));
        let compiled = compiled.map_err(token())?;
        let (starved, mut done): (Vec<_>, Vec<_>) =
            compiled.into_iter().partition(|done| done.again.is_some());
        // No machine has that much memory, so each runs when nothing else does.
        let again = starved.into_iter().filter_map(|done| done.again);
        let alone = again.map(|work| Job {
            work,
            memory: u64::MAX,
            kin: None,
            seconds: 0.0,
        });
        let alone = alone.collect();
        let again = schedule::run(alone, limits, is_stopped, |work| compile(work, true));
        done.extend(again.map_err(token())?);
        Ok(done)
    }

    fn first_key(&self, unit: &Unit, hasher: &Hasher) -> Result<Key, Error> {
        let source = self.tools.compiler.root.join(&unit.source);
        let content = hasher
            .content(&source)
            .ok_or(io::ErrorKind::NotFound)
            .map_err(|kind| Error::File {
                action: "read",
                path: source,
                source: kind.into(),
            })?;
        let canonical = self.tools.compiler.canonical(unit);
        let (nvcc, programs) = match unit.language {
            Language::Cuda => (
                self.tools.compiler.cuda.version_text.as_str(),
                self.tools.programs.as_bytes().as_slice(),
            ),
            Language::Cpp => ("", [].as_slice()),
        };
        // The place within the package is part of it: a quoted include starts from there.
        let mut parts: Vec<&[u8]> = vec![
            unit.source.as_bytes(),
            content.hash.as_bytes(),
            nvcc.as_bytes(),
            self.tools.compiler.host.version_text.as_bytes(),
            programs,
            self.tools.named_contents.as_bytes(),
        ];
        parts.extend(canonical.iter().map(|argument| argument.as_bytes()));
        Ok(Key::new(parts))
    }

    /// Estimates the time and the memory that compiling a unit takes. If neither is known
    /// from an earlier build, the result also names the folder of the similar units.
    fn expected(&self, unit: &Unit) -> (Estimate, Option<String>) {
        // A unit that includes CUTLASS needs a few GiB, a small one half of one.
        const UNKNOWN: Estimate = Estimate {
            seconds: 30.0,
            peak: 2 << 30,
        };
        let known = |unit: &Unit| {
            let exact = self.cache.estimate(self.unit_key(unit));
            exact.or_else(|| self.cache.estimate(self.source_key(unit)))
        };
        if let Some(known) = known(unit) {
            return (known, None);
        }
        let mut estimate = UNKNOWN;
        if let Some(bytes) = unit.memory {
            estimate.peak = bytes;
            return (estimate, None);
        }
        let kin = |unit: &Unit| {
            let folder = unit.source.rsplit_once('/');
            folder.map_or(String::new(), |(folder, _)| folder.to_owned())
        };
        let similar = self
            .sources
            .units
            .iter()
            .filter(|other| kin(other) == kin(unit));
        let max = similar
            .filter_map(known)
            .map(|estimate| estimate.peak)
            .max();
        estimate.peak = estimate.peak.max(max.unwrap_or(0));
        (estimate, Some(kin(unit)))
    }

    /// The key of the estimate for a source, whatever its targets. It serves a source that is
    /// compiled for other targets than before.
    fn source_key(&self, unit: &Unit) -> Key {
        Key::new([self.package.as_bytes(), unit.source.as_bytes()])
    }

    fn keep_estimate(&self, unit: &Unit, estimate: Estimate) {
        for key in [self.unit_key(unit), self.source_key(unit)] {
            self.cache.keep_estimate(key, estimate);
        }
    }

    /// The key of the estimate for a unit, whatever its content. The time and memory of its last
    /// compilation are stored under it.
    fn unit_key(&self, unit: &Unit) -> Key {
        let targets = unit.targets().join(" ");
        Key::new([
            self.package.as_bytes(),
            unit.source.as_bytes(),
            targets.as_bytes(),
        ])
    }

    /// The object and the files that it was made of, or why it has to be compiled.
    fn look_up(&self, first: Key, hasher: &Hasher) -> Result<(Entry, Vec<PathBuf>), String> {
        let mut reason = None;
        for set in &self.cache.manifest(first).sets {
            match set.check(&self.tools.roles, &self.tools.lookup, hasher) {
                Ok(files) => match self.cache.load(first.with_dependencies(set)) {
                    Loaded::Whole(entry) => {
                        self.cache.used(first);
                        return Ok((entry, files));
                    }
                    Loaded::Missing => {
                        reason = reason.or(Some("its object is gone from the cache".to_owned()))
                    }
                    Loaded::Corrupted => {
                        reason = reason.or(Some("its object in the cache is corrupted".to_owned()))
                    }
                },
                // The latest set comes first, and what changed against it is what the user wants to
                // know.
                Err(changed) => reason = reason.or(Some(changed)),
            }
        }
        Err(reason.unwrap_or_else(|| "its source, flags and compilers are new together".to_owned()))
    }

    fn compile_unit(&self, index: usize, first: Key, reason: String, shared: &Shared<'_>) -> Done {
        let Shared {
            hasher,
            progress,
            workshop,
            ..
        } = *shared;
        let unit = &self.sources.units[index];
        let _guard = self.cache.lock(first);
        // Another build may have compiled it while this one waited for the lock.
        if let Ok((entry, files)) = self.look_up(first, hasher) {
            return self.take(index, entry, files, Outcome::Cached, String::new());
        }
        let stopped = |reason: &str| Done {
            index,
            outcome: Outcome::Stopped,
            reason: reason.to_owned(),
            entry: None,
            files: vec![self.tools.compiler.root.join(&unit.source)],
            failure: None,
            error: None,
            is_starved: false,
            again: None,
        };
        if shared.is_stopped() {
            return stopped(&reason);
        }
        progress.tell(&Event::Started {
            unit: unit.to_string(),
            reason: reason.clone(),
        });
        let failed = |failure, error| Done {
            outcome: Outcome::Failed,
            failure,
            error,
            ..stopped(&reason)
        };
        let (command, folder, finished) = match self.run_compiler(unit, shared) {
            Ok(ran) => ran,
            Err(error) => return failed(None, Some(error)),
        };
        let log = self.objects.join(format!("{}.log", unit.file_stem()));
        // Said to the user as the place of the whole output; without it the first error is still
        // shown.
        let _ = fs::write(&log, format!("{command:?}\n{}", finished.log));
        if !finished.status.success() {
            if shared.is_stopped() {
                return stopped(&reason);
            }
            let (failure, is_starved) = self.failure(unit, &finished, log);
            return Done {
                is_starved,
                ..failed(Some(failure), None)
            };
        }
        let (entry, files) = match self.made(unit, finished, &folder, workshop.path()) {
            Ok(made) => made,
            Err(error) => return failed(None, Some(error)),
        };
        match self.dependencies(unit, &files, shared.trusted, hasher) {
            Ok(set) => self.cache.keep(first, set, &entry),
            Err(path) => progress.tell(&Event::Noted {
                text: format!(
                    "{unit} is not kept: {} changed while it was compiled",
                    path.display()
                ),
            }),
        }
        self.take(index, entry, files, Outcome::Compiled, reason)
    }

    /// Runs a unit's compiler in a folder of its own. A compiler that fails is no error here.
    fn run_compiler(
        &self,
        unit: &Unit,
        shared: &Shared<'_>,
    ) -> Result<(Command, PathBuf, Finished), Error> {
        let folder = shared.workshop.folder(&unit.file_stem())?;
        let mut command = self.tools.compiler.command(unit, &folder, shared.maps)?;
        let ran = shared.workshop.run(&mut command);
        let finished = ran.map_err(Error::file("run", self.tools.compiler.program(unit)))?;
        Ok((command, folder, finished))
    }

    /// Describes the failure of a compiler. The second value is true if the compiler had too little
    /// memory.
    fn failure(&self, unit: &Unit, finished: &Finished, log: PathBuf) -> (FailedUnit, bool) {
        let failure = FailedUnit {
            unit: unit.to_string(),
            first_error: diagnostic::first_error(&finished.log, &finished.status.to_string()),
            hint: diagnostic::hint(&finished.log, finished.signal()),
            log,
        };
        let is_starved = diagnostic::ran_out_of_memory(&finished.log, finished.signal());
        if is_starved {
            // The larger estimate keeps the next build from running this unit beside others.
            let (mut estimate, _) = self.expected(unit);
            estimate.peak = estimate.peak.max(finished.peak).saturating_mul(2);
            self.keep_estimate(unit, estimate);
        }
        (failure, is_starved)
    }

    /// The object that a compiler wrote into its folder of the workshop, and the files that it
    /// read.
    fn made(
        &self,
        unit: &Unit,
        finished: Finished,
        folder: &Path,
        workshop: &Path,
    ) -> Result<(Entry, Vec<PathBuf>), Error> {
        let read = |path: &Path| {
            bounded::read(path).map_err(Error::file("read what nvcc was to write,", path))
        };
        let object = read(&folder.join(compiler::OBJECT))?;
        let rule = read(&folder.join(compiler::DEPENDENCIES))?;
        let files: Vec<_> =
            depfile::files(&String::from_utf8_lossy(&rule), &self.tools.compiler.root)
                .into_iter()
                // Files below the workshop are made for the compiler or by it.
                .filter(|path| !path.starts_with(workshop))
                .collect();
        let estimate = Estimate {
            seconds: finished.processor.as_secs_f64(),
            peak: finished.peak,
        };
        let entry = Entry {
            meta: Meta {
                seconds: estimate.seconds,
                peak: estimate.peak,
                log: finished.log,
            },
            object,
        };
        self.keep_estimate(unit, estimate);
        Ok((entry, files))
    }

    /// The dependencies of the compilation. The error is a file that may have changed since the
    /// compiler read it.
    fn dependencies(
        &self,
        unit: &Unit,
        files: &[PathBuf],
        trusted: SystemTime,
        hasher: &Hasher,
    ) -> Result<DependencySet, PathBuf> {
        // The source itself is always one, whatever the compiler says.
        let source = self.tools.compiler.root.join(&unit.source);
        let mut all = vec![source];
        all.extend_from_slice(files);
        let trusted = trusted
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        for path in &all {
            let Ok(data) = fs::metadata(path) else {
                return Err(path.clone());
            };
            if last_change(&data) >= trusted && content_now(path).ok() != hasher.known(path) {
                return Err(path.clone());
            }
        }
        DependencySet::new(&all, &self.tools.roles, &self.tools.lookup, hasher, trusted)
    }

    fn take(
        &self,
        index: usize,
        entry: Entry,
        files: Vec<PathBuf>,
        outcome: Outcome,
        reason: String,
    ) -> Done {
        Done {
            index,
            outcome,
            reason,
            entry: Some(entry),
            files,
            failure: None,
            error: None,
            is_starved: false,
            again: None,
        }
    }

    /// The path from which the archiver takes a unit's object.
    pub(super) fn object(&self, unit: &Unit) -> PathBuf {
        self.objects.join(format!("{}.o", unit.file_stem()))
    }
}
