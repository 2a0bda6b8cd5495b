//! Compilation of each unit. Its object comes from the cache, or from the compiler and is then
//! cached.

use std::{
    fs, io,
    path::{Path, PathBuf},
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
    work_folder::WorkFolder,
};

/// The state that all compilations of a build share.
struct Shared<'a> {
    /// Files that changed at this time or later are not trusted.
    trusted: SystemTime,
    hasher: &'a Hasher,
    progress: &'a Progress,
    work_folder: &'a WorkFolder,
    /// The file with the [`Compiler::path_maps`](crate::compiler::Compiler::path_maps).
    maps: &'a Path,
    /// Set when a unit has failed and the others need not be compiled.
    is_stopped: AtomicBool,
}

impl Shared<'_> {
    /// If the build stops at the first error, ends all other compilers that still run, including
    /// one that starts at this moment. Returns true if the build stops.
    fn is_stopped(&self) -> bool {
        let is_stopped = self.is_stopped.load(Ordering::SeqCst);
        if is_stopped {
            self.work_folder.stop();
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
        // Files that change from here on are not trusted. The clock of a file system may lag behind
        // by one tick of the kernel, so this waits for longer than a tick.
        let trusted = SystemTime::now();
        thread::sleep(Duration::from_millis(10));
        let hasher = Hasher::default();

        let mut done = Vec::new();
        let mut jobs = Vec::new();
        for (index, unit) in self.units.iter().enumerate() {
            let first = self.first_key(unit, &hasher)?;
            match self.look_up(first, &hasher) {
                Ok(found) => done.push(Done::cached(index, found)),
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
            package: self.library.package.clone(),
            units: self.units.len(),
            cached: done.len(),
        });
        if !jobs.is_empty() {
            let work_folder = WorkFolder::open(&self.library.out_dir)?;
            let maps = self.write_path_maps(&work_folder)?;
            let shared = Shared {
                trusted,
                hasher: &hasher,
                progress,
                work_folder: &work_folder,
                maps: &maps,
                is_stopped: AtomicBool::new(false),
            };
            done.extend(self.compile_jobs(jobs, limits, &shared)?);
        }
        // The sort is stable, so the first failure stays first.
        done.sort_by_key(|done| done.failure.is_none().then_some(done.index));
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
            let source = self.library.root.join(&self.units[index].source);
            let unfinished = Done::unfinished(index, reason.clone(), vec![source]);
            let done = self.compile_unit(unfinished, first, shared);
            let done = done.unwrap_or_else(|error| Done {
                outcome: Outcome::Failed,
                error: Some(error),
                ..Done::unfinished(index, reason, Vec::new())
            });
            let peak = done.entry.as_ref().map_or(0, |entry| entry.meta.peak);
            if done.is_starved && !is_alone {
                shared.progress.tell(&Event::Noted {
                    text: format!(
                        "{} ran out of memory; it is compiled once more, alone",
                        self.units[index]
                    ),
                });
                return schedule::Done { result: done, peak };
            }
            if !self.keep_going && (done.failure.is_some() || done.error.is_some()) {
                shared.is_stopped.store(true, Ordering::SeqCst);
            }
            shared.progress.tell(&Event::Finished {
                unit: self.units[index].to_string(),
                outcome: done.outcome,
                seconds: started.elapsed().as_secs_f64(),
                peak,
                error: match (&done.failure, &done.error) {
                    (Some(failure), _) => Some(failure.first_error.clone()),
                    (None, error) => error.as_ref().map(ToString::to_string),
                },
            });
            schedule::Done { result: done, peak }
        };
        let token = || Error::file("take a token of the jobserver for", &self.library.out_dir);
        let is_stopped = || shared.is_stopped();
        let compiled = schedule::run(jobs, limits, is_stopped, |work| compile(work, false));
        let compiled = compiled.map_err(token())?;
        let (starved, mut done): (Vec<_>, Vec<_>) =
            compiled.into_iter().partition(|done| done.is_starved);
        // No machine has that much memory, so each of these units runs alone.
        let alone = starved.into_iter().map(|done| {
            let first = self.first_key(&self.units[done.index], shared.hasher)?;
            Ok(Job {
                work: (done.index, first, done.reason),
                memory: u64::MAX,
                kin: None,
                seconds: 0.0,
            })
        });
        let alone = alone.collect::<Result<_, Error>>()?;
        let again = schedule::run(alone, limits, is_stopped, |work| compile(work, true));
        done.extend(again.map_err(token())?);
        Ok(done)
    }

    fn first_key(&self, unit: &Unit, hasher: &Hasher) -> Result<Key, Error> {
        let source = self.library.root.join(&unit.source);
        let content = hasher.content(&source).ok_or(io::ErrorKind::NotFound);
        let content = content.map_err(Error::file("read", source))?;
        let canonical = self.tools.compiler.canonical(unit);
        let (nvcc, programs) = match unit.language {
            Language::Cuda => (
                self.tools.compiler.cuda.version_text.as_str(),
                self.tools.programs.as_bytes().as_slice(),
            ),
            Language::Cpp => ("", [].as_slice()),
        };
        // The source's path in the package is part of the key, since quoted includes start from its
        // folder.
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

    /// Estimates the time and the memory that compiling a unit takes. If neither an earlier build
    /// nor the script tells the memory, the result also names the folder of similar units, from
    /// which it is taken.
    fn expected(&self, unit: &Unit) -> (Estimate, Option<String>) {
        let known = |unit: &Unit| {
            let keys = self.estimate_keys(unit);
            keys.into_iter().find_map(|key| self.cache.estimate(key))
        };
        if let Some(known) = known(unit) {
            return (known, None);
        }
        // A unit that includes CUTLASS needs a few GiB, a small one half a GiB.
        let unknown = |peak| Estimate {
            seconds: 30.0,
            peak,
        };
        if let Some(bytes) = unit.memory {
            return (unknown(bytes), None);
        }
        let kin = |unit: &Unit| unit.source.rsplit_once('/').map(|(it, _)| it.to_owned());
        let similar = self.units.iter().filter(|other| kin(other) == kin(unit));
        let peaks = similar.filter_map(known).map(|estimate| estimate.peak);
        let peak = peaks.fold(2 << 30, u64::max);
        (unknown(peak), Some(kin(unit).unwrap_or_default()))
    }

    /// Returns the keys of the estimates for a unit, which do not depend on its content.
    ///
    /// The time and memory of its last compilation are stored under both. The second key is used if
    /// a source is compiled for other targets than before.
    fn estimate_keys(&self, unit: &Unit) -> [Key; 2] {
        let targets = unit.targets().join(" ");
        let parts = [&self.library.package, &unit.source, &targets].map(|it| it.as_bytes());
        [Key::new(parts), Key::new(parts.into_iter().take(2))]
    }

    fn keep_estimate(&self, unit: &Unit, estimate: Estimate) {
        for key in self.estimate_keys(unit) {
            self.cache.keep_estimate(key, estimate);
        }
    }

    /// Returns the object and the files that it was made from, or the reason why it has to be
    /// compiled.
    fn look_up(&self, first: Key, hasher: &Hasher) -> Result<(Entry, Vec<PathBuf>), String> {
        let mut reason = None;
        for set in &self.cache.manifest(first).sets {
            let changed = match set.check(&self.tools.roles, &self.tools.lookup, hasher) {
                Ok(files) => match self.cache.load(first.with_dependencies(set)) {
                    Loaded::Whole(entry) => {
                        self.cache.used(first);
                        return Ok((entry, files));
                    }
                    Loaded::Missing => "its object is gone from the cache".to_owned(),
                    Loaded::Corrupted => "its object in the cache is corrupted".to_owned(),
                },
                Err(changed) => changed,
            };
            // The latest set comes first. The user wants to know what changed since that set.
            reason.get_or_insert(changed);
        }
        Err(reason.unwrap_or_else(|| "its source, flags and compilers are new together".to_owned()))
    }

    /// Compiles the unit of a result, and completes the result.
    fn compile_unit(
        &self,
        unfinished: Done,
        first: Key,
        shared: &Shared<'_>,
    ) -> Result<Done, Error> {
        let (hasher, progress) = (shared.hasher, shared.progress);
        let unit = &self.units[unfinished.index];
        let _guard = self.cache.lock(first);
        // Another build may have compiled it while this one waited for the lock.
        if let Ok(found) = self.look_up(first, hasher) {
            return Ok(Done::cached(unfinished.index, found));
        }
        if shared.is_stopped() {
            return Ok(unfinished);
        }
        progress.tell(&Event::Started {
            unit: unit.to_string(),
            reason: unfinished.reason.clone(),
        });
        let (finished, folder, log) = self.run_compiler(unit, shared)?;
        if !finished.status.success() {
            if shared.is_stopped() {
                return Ok(unfinished);
            }
            let (failure, is_starved) = self.failure(unit, &finished, log);
            return Ok(Done {
                outcome: Outcome::Failed,
                failure: Some(failure),
                is_starved,
                ..unfinished
            });
        }
        let (entry, files) = self.made(unit, finished, &folder, shared.work_folder.path())?;
        match self.dependencies(unit, &files, shared.trusted, hasher) {
            Ok(set) => self.cache.keep(first, set, &entry),
            Err(path) => progress.tell(&Event::Noted {
                text: format!(
                    "{unit} is not kept: {} changed while it was compiled",
                    path.display()
                ),
            }),
        }
        Ok(Done {
            outcome: Outcome::Compiled,
            entry: Some(entry),
            files,
            ..unfinished
        })
    }

    /// Runs a unit's compiler in a folder of its own, and keeps its output in a file. If the
    /// compiler fails, this function still succeeds.
    fn run_compiler(
        &self,
        unit: &Unit,
        shared: &Shared<'_>,
    ) -> Result<(Finished, PathBuf, PathBuf), Error> {
        let folder = shared.work_folder.folder(&unit.file_stem())?;
        let mut command = self.tools.compiler.command(unit, &folder, shared.maps)?;
        let ran = shared.work_folder.run(&mut command);
        let finished = ran.map_err(Error::file("run", self.tools.compiler.program(unit)))?;
        let log = self.library.object(unit).with_extension("log");
        // The user is told that this file has the whole output. If it cannot be written, the first
        // error is still shown.
        let _ = fs::write(&log, format!("{command:?}\n{}", finished.log));
        Ok((finished, folder, log))
    }

    /// Writes the file with the [`path_maps`](crate::compiler::Compiler::path_maps).
    pub(super) fn write_path_maps(&self, work_folder: &WorkFolder) -> Result<PathBuf, Error> {
        let maps = work_folder.path().join("maps");
        let text = self.tools.compiler.path_maps();
        fs::write(&maps, text).map_err(Error::file("write", &maps))?;
        Ok(maps)
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
            // The larger estimate keeps the next build from running this unit at the same time as
            // others.
            let (mut estimate, _) = self.expected(unit);
            estimate.peak = estimate.peak.max(finished.peak).saturating_mul(2);
            self.keep_estimate(unit, estimate);
        }
        (failure, is_starved)
    }

    /// Returns the object that a compiler wrote into its part of the work folder, and the files
    /// that it read.
    fn made(
        &self,
        unit: &Unit,
        finished: Finished,
        folder: &Path,
        work_folder: &Path,
    ) -> Result<(Entry, Vec<PathBuf>), Error> {
        let read = |path: &Path| {
            bounded::read(path).map_err(Error::file("read what nvcc was to write,", path))
        };
        let object = read(&folder.join(compiler::OBJECT))?;
        let rule = read(&folder.join(compiler::DEPENDENCIES))?;
        let files: Vec<_> = depfile::files(&String::from_utf8_lossy(&rule), &self.library.root)
            .into_iter()
            // Files below the work folder were made for the compiler or by it.
            .filter(|path| !path.starts_with(work_folder))
            .collect();
        let (seconds, peak) = (finished.processor.as_secs_f64(), finished.peak);
        self.keep_estimate(unit, Estimate { seconds, peak });
        let log = finished.log;
        let meta = Meta { seconds, peak, log };
        Ok((Entry { meta, object }, files))
    }

    /// Returns the dependencies of the compilation. The error is a file that may have changed since
    /// the compiler read it.
    fn dependencies(
        &self,
        unit: &Unit,
        files: &[PathBuf],
        trusted: SystemTime,
        hasher: &Hasher,
    ) -> Result<DependencySet, PathBuf> {
        // The source itself is always a dependency, even if the compiler does not list it.
        let source = self.library.root.join(&unit.source);
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
}

impl Done {
    /// Makes the result of a unit that is not compiled yet.
    fn unfinished(index: usize, reason: String, files: Vec<PathBuf>) -> Self {
        Self {
            index,
            outcome: Outcome::Stopped,
            reason,
            entry: None,
            files,
            failure: None,
            error: None,
            is_starved: false,
        }
    }

    fn cached(index: usize, (entry, files): (Entry, Vec<PathBuf>)) -> Self {
        Self {
            outcome: Outcome::Cached,
            entry: Some(entry),
            ..Self::unfinished(index, String::new(), files)
        }
    }
}
