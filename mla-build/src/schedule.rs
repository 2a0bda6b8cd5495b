//! The order of the compilers, and the number that run at once.
//!
//! Cargo's jobserver decides how many compilers run. This process has one token of its own, and
//! every further compiler waits for one of Cargo's. Memory is a second limit. A unit starts when
//! its expected peak fits into the memory that is left, or when nothing else runs here. A build on
//! a small machine is therefore slow, but does not fail.

use std::{
    sync::{OnceLock, mpsc},
    thread,
    time::Duration,
};

use crate::memory;

/// A job: one thing to run.
pub(crate) struct Job<T> {
    pub(crate) work: T,
    /// The bytes that it is expected to need at its peak.
    pub(crate) memory: u64,
    /// The folder of its source, if `memory` is a default. A job of the same folder that needed
    /// more raises `memory`.
    pub(crate) kin: Option<String>,
    /// The seconds that it is expected to take. The longest job starts first, so that it does not
    /// run alone at the end.
    pub(crate) seconds: f64,
}

/// The sources of the limits on jobs.
pub(crate) struct Limits {
    /// The build's jobserver.
    pub(crate) jobserver: jobserver::Client,
    /// Returns the bytes that are available now.
    pub(crate) available: fn() -> Option<u64>,
}

impl Limits {
    /// Uses Cargo's jobserver if Cargo started this process, and otherwise makes one of `jobs`
    /// tokens.
    pub(crate) fn new(jobs: Option<usize>) -> std::io::Result<Self> {
        // The descriptors can be taken over once, so all libraries of a build script share them.
        static INHERITED: OnceLock<Option<jobserver::Client>> = OnceLock::new();
        let inherited = match jobs {
            Some(_) => None,
            // SAFETY: Cargo opened the descriptors that the environment names for this process, and
            // nothing else in this crate takes or closes them. The call comes before any file of
            // the first build is opened that could have taken their numbers.
            None => (INHERITED.get_or_init(|| unsafe { jobserver::Client::from_env() })).clone(),
        };
        let all = || thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            jobserver: match inherited {
                Some(client) => client,
                None => jobserver::Client::new(jobs.unwrap_or_else(all).saturating_sub(1))?,
            },
            available: memory::available,
        })
    }
}

enum Event<R> {
    Token(std::io::Result<jobserver::Acquired>),
    Done {
        number: usize,
        own_token: bool,
        done: Done<R>,
    },
}

/// The result of a job.
pub(crate) struct Done<R> {
    pub(crate) result: R,
    /// The bytes that it needed at its peak.
    pub(crate) peak: u64,
}

/// The jobs of a run, waiting and running, and the memory that they share.
struct Queue<'a, T> {
    limits: &'a Limits,
    waiting: Vec<Job<T>>,
    /// The jobs that were started, numbered in this order.
    running: Vec<Job<usize>>,
    /// The memory that was available when nothing ran. The memory that running jobs may still need
    /// is subtracted from it.
    budget: u64,
    started: usize,
}

impl<'a, T> Queue<'a, T> {
    fn new(mut waiting: Vec<Job<T>>, limits: &'a Limits) -> Self {
        // The sort is stable, so jobs of unknown duration stay in the order of the sources.
        waiting.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Self {
            limits,
            waiting,
            running: Vec::new(),
            budget: (limits.available)().unwrap_or(u64::MAX),
            started: 0,
        }
    }

    /// Returns the first job, from the longest on, that may start now.
    fn next(&self) -> Option<usize> {
        if self.running.is_empty() {
            return (!self.waiting.is_empty()).then_some(0);
        }
        let needs = self.running.iter().map(|job| job.memory);
        let promised = needs.fold(0, u64::saturating_add);
        let unpromised = self.budget.saturating_sub(promised);
        let room = unpromised.min((self.limits.available)().unwrap_or(u64::MAX));
        self.waiting.iter().position(|job| job.memory <= room)
    }

    /// Takes the job at this index, and numbers it.
    fn start(&mut self, at: usize) -> (usize, T) {
        let job = self.waiting.remove(at);
        self.started += 1;
        self.running.push(Job {
            work: self.started,
            memory: job.memory,
            kin: job.kin,
            seconds: job.seconds,
        });
        (self.started, job.work)
    }

    /// Ends a job, and raises the estimated memory of all jobs, waiting and running, of the same
    /// kin.
    fn end(&mut self, number: usize, peak: u64) {
        let at = self.running.iter().position(|job| job.work == number);
        if let Some(kin) = at.and_then(|at| self.running.swap_remove(at).kin) {
            let waiting = self
                .waiting
                .iter_mut()
                .map(|job| (&job.kin, &mut job.memory));
            let running = self
                .running
                .iter_mut()
                .map(|job| (&job.kin, &mut job.memory));
            for (other, memory) in waiting.chain(running) {
                if other.as_ref() == Some(&kin) {
                    *memory = (*memory).max(peak);
                }
            }
        }
        if self.running.is_empty() {
            self.budget = (self.limits.available)().unwrap_or(u64::MAX);
        }
    }
}

/// Tokens that no job holds: this process's own one, and one of the jobserver's, which is returned
/// when it is dropped.
struct Tokens {
    helper: jobserver::HelperThread,
    own_is_free: bool,
    is_asked: bool,
    spare: Option<jobserver::Acquired>,
}

impl Tokens {
    /// Takes a token, with `None` in it for this process's own. If there is none, asks the
    /// jobserver for one.
    fn take(&mut self) -> Option<Option<jobserver::Acquired>> {
        if std::mem::take(&mut self.own_is_free) {
            return Some(None);
        }
        if self.spare.is_none() && !self.is_asked {
            self.is_asked = true;
            self.helper.request_token();
        }
        self.spare.take().map(Some)
    }
}

/// Runs every job on a thread of its own, and returns the results in the order in which they ended.
///
/// `is_stopped` is polled. Once it returns true, no further job starts.
pub(crate) fn run<T: Send, R: Send + 'static>(
    jobs: Vec<Job<T>>,
    limits: &Limits,
    is_stopped: impl Fn() -> bool,
    work: impl Fn(T) -> Done<R> + Sync,
) -> std::io::Result<Vec<R>> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let mut results = Vec::with_capacity(jobs.len());
    let mut queue = Queue::new(jobs, limits);
    let (sender, events) = mpsc::channel();
    let tell = sender.clone();
    let helper = limits.jobserver.clone().into_helper_thread(move |token| {
        // The receiver is dropped only when nothing waits for tokens any more.
        let _ = tell.send(Event::Token(token));
    })?;
    let mut tokens = Tokens {
        helper,
        own_is_free: true,
        is_asked: false,
        spare: None,
    };
    thread::scope(|scope| -> std::io::Result<()> {
        loop {
            if is_stopped() {
                queue.waiting.clear();
            }
            while let Some(at) = queue.next() {
                let Some(token) = tokens.take() else { break };
                let (number, job) = queue.start(at);
                let (sender, work) = (sender.clone(), &work);
                scope.spawn(move || {
                    let done = work(job);
                    let own_token = token.is_none();
                    drop(token);
                    let _ = sender.send(Event::Done {
                        number,
                        own_token,
                        done,
                    });
                });
            }
            // A token that cannot be used here, since memory is short, is left to other processes.
            tokens.spare = None;
            if queue.waiting.is_empty() && queue.running.is_empty() {
                return Ok(());
            }
            // Other processes may free memory as well, so it is checked again before a job ends.
            match events.recv_timeout(Duration::from_millis(200)) {
                Ok(Event::Token(token)) => {
                    tokens.is_asked = false;
                    tokens.spare = Some(token?);
                }
                Ok(Event::Done {
                    number,
                    own_token,
                    done,
                }) => {
                    queue.end(number, done.peak);
                    results.push(done.result);
                    tokens.own_is_free |= own_token;
                }
                Err(_) => {}
            }
        }
    })?;
    Ok(results)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    fn done<R>(result: R) -> Done<R> {
        Done { result, peak: 0 }
    }

    fn job<T>(work: T) -> Job<T> {
        Job {
            work,
            memory: 0,
            kin: None,
            seconds: 1.0,
        }
    }

    fn limits(tokens: usize, available: fn() -> Option<u64>) -> Limits {
        Limits {
            jobserver: jobserver::Client::new(tokens).unwrap(),
            available,
        }
    }

    /// Returns the maximum number of jobs that ran at once.
    fn max_at_once(memory: u64, tokens: usize, available: fn() -> Option<u64>) -> usize {
        let limits = limits(tokens, available);
        let (now, max) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let jobs = (0..6).map(|work| Job {
            memory,
            ..job(work)
        });
        let results = run(
            jobs.collect(),
            &limits,
            || false,
            |number: usize| {
                max.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                thread::sleep(Duration::from_millis(60));
                now.fetch_sub(1, SeqCst);
                done(number)
            },
        )
        .unwrap();
        let mut numbers = results.clone();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        max.into_inner()
    }

    #[test]
    fn the_jobserver_bounds_how_many_run() {
        assert_eq!(max_at_once(1, 0, || None), 1);
        assert_eq!(max_at_once(1, 1, || None), 2);
        assert_eq!(max_at_once(1, 2, || None), 3);
    }

    #[test]
    fn memory_bounds_how_many_run_and_never_stops_the_last() {
        assert_eq!(max_at_once(4, 5, || Some(9)), 2);
        assert_eq!(max_at_once(4, 5, || Some(100)), 6);
        assert_eq!(
            max_at_once(4, 5, || Some(1)),
            1,
            "one runs even where it does not fit"
        );
    }

    /// Six jobs are expected to take 2 bytes each, and take 10. The first two run together. After
    /// that, the raised estimate for their folder keeps the other jobs apart.
    #[test]
    fn a_low_estimate_is_raised_by_the_first_that_ends() {
        let limits = limits(1, || Some(12));
        let together = |kin: fn(usize) -> Option<String>| {
            let (now, seen) = (AtomicUsize::new(0), std::sync::Mutex::new(Vec::new()));
            let jobs = (0..6).map(|work| Job {
                memory: 2,
                kin: kin(work),
                ..job(work)
            });
            run(
                jobs.collect(),
                &limits,
                || false,
                |number: usize| {
                    let running = now.fetch_add(1, SeqCst) + 1;
                    seen.lock().unwrap().push(running);
                    // The first of a pair ends before the second.
                    thread::sleep(Duration::from_millis(40 + 40 * (number as u64 % 2)));
                    now.fetch_sub(1, SeqCst);
                    Done {
                        result: (),
                        peak: 10,
                    }
                },
            )
            .unwrap();
            seen.into_inner().unwrap()
        };
        let same_folder = together(|_| Some("cuda/sm100".to_owned()));
        assert_eq!(same_folder[2..], [1; 4], "{same_folder:?}");
        let strangers = together(|number| Some(number.to_string()));
        assert!(strangers[2..].contains(&2), "{strangers:?}");
    }

    #[test]
    fn the_longest_starts_first() {
        let jobs = [1.0, 3.0, 2.0].map(|seconds| Job {
            seconds,
            ..job(seconds)
        });
        let ran = run(jobs.into(), &limits(0, || None), || false, done).unwrap();
        assert_eq!(ran, [3.0, 2.0, 1.0]);
    }

    #[test]
    fn tokens_are_given_back() {
        let limits = limits(2, || None);
        let jobs = (0..4).map(job).collect();
        run(jobs, &limits, || false, |_: i32| done(())).unwrap();
        for _ in 0..2 {
            std::mem::forget(limits.jobserver.acquire().unwrap());
        }
    }
}
