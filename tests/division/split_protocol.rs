//! Tests of the split protocol with the kernels' own code on the host. They try every order in
//! which CTAs can take their steps. `cuda/common/split_protocol.cuh` draws its states. The first
//! part is decode's use among the CTAs that share a query tile, and the second part is prefill's
//! use among all CTAs of a launch.

use std::collections::HashSet;
use std::hash::Hash;

use mla_kernels::raw::{self, MlaSplitCounters, MlaSplitRole, MlaSplitStep};
use rand::{RngExt as _, SeedableRng as _};

use super::checked;

/// The maximum numbers of CTAs of a tile in the tests of every order and in the tests of random
/// orders. The second is also the maximum of a launch.
const MAX: usize = 5;
const MANY: usize = 160;

/// State of a CTA. Its partial result is in the workspace before its first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    /// A CTA that has not counted its arrival.
    Computing,
    /// A combiner, about to look at the counters.
    Waiting,
    /// A combiner whose patience has ended after it saw this value of the counter.
    Impatient(i32),
    /// A combiner, about to write its slice to the workspace and to yield.
    Yielding,
    /// A combiner that has seen all arrive. It is about to leave, and then to combine its slice.
    Slice,
    /// A CTA that is about to leave, and then to combine everything or nothing.
    Leaving {
        everything: bool,
    },
    /// A combiner that combines its slice. If it left last, it resets the counters afterwards.
    Combining {
        resets: bool,
    },
    /// A CTA that resets the counters, and then combines everything or nothing.
    Resetting {
        everything: bool,
    },
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct State<const CTAS: usize> {
    arrived: i32,
    left: i32,
    at: [At; CTAS],
    /// Number of times that each combiner's slice has been combined.
    combined: [u8; CTAS],
    /// True once the counters have been reset.
    reset: bool,
}

impl<const CTAS: usize> State<CTAS> {
    const START: Self = Self {
        arrived: 0,
        left: 0,
        at: [At::Computing; CTAS],
        combined: [0; CTAS],
        reset: false,
    };
}

/// Visits every reachable state, and returns their number.
fn explore<S: Copy + Eq + Hash>(
    start: S,
    next: impl Fn(&S) -> Vec<S>,
    check_end: impl Fn(&S),
) -> usize {
    let mut seen = HashSet::from([start]);
    let mut open = vec![start];
    while let Some(state) = open.pop() {
        let next = next(&state);
        if next.is_empty() {
            check_end(&state);
        }
        open.extend(next.into_iter().filter(|&state| seen.insert(state)));
    }
    seen.len()
}

struct Tile {
    splits: usize,
    /// The number of combiners. They are the first splits, which have nothing else to do.
    combiners: usize,
    /// True if patience may end.
    impatient: bool,
    /// A CTA that does not run, if there is one.
    frozen: Option<usize>,
}

impl Tile {
    fn explore(&self) -> usize {
        let next = |state: &_| self.successors(state);
        explore(State::<MAX>::START, next, |state| self.check_end(state))
    }

    /// Tries one random order. It draws the CTA whose step is next, and lets a combiner that could
    /// fall back do so in one of `patience` cases. Returns true if the tile fell back.
    fn walk(&mut self, patience: u32, rng: &mut rand::rngs::StdRng) -> bool {
        let mut state = State::<MANY>::START;
        let mut fell_back = false;
        loop {
            self.impatient = rng.random_range(0..patience) == 0;
            let first = rng.random_range(0..self.splits);
            let next = self.next(&state, first).or_else(|| {
                // Others wait until their patience ends only if a CTA does not run.
                self.impatient = true;
                let next = self.next(&state, first);
                assert!(next.is_none() || self.frozen.is_some(), "all run, and wait");
                next
            });
            let Some(next) = next else { break };
            fell_back |= next.arrived >= 1 << 30;
            state = next;
        }
        self.check_end(&state);
        fell_back
    }

    /// Takes the next step of the first CTA, from this one on, that can take one.
    fn next<const CTAS: usize>(&self, state: &State<CTAS>, first: usize) -> Option<State<CTAS>> {
        (0..self.splits)
            .map(|i| (first + i) % self.splits)
            .filter(|&cta| self.frozen != Some(cta))
            .find_map(|cta| self.step(state, cta))
    }

    fn successors<const CTAS: usize>(&self, state: &State<CTAS>) -> Vec<State<CTAS>> {
        (0..self.splits)
            .filter(|&cta| self.frozen != Some(cta))
            .filter_map(|cta| self.step(state, cta))
            .collect()
    }

    /// Returns the state after this CTA's next step, or `None` if it is done or has to wait.
    fn step<const CTAS: usize>(&self, state: &State<CTAS>, cta: usize) -> Option<State<CTAS>> {
        let mut next = *state;
        let mut counters = MlaSplitCounters {
            arrived: state.arrived,
            left: state.left,
        };
        let touches = !matches!(state.at[cta], At::Combining { resets: false } | At::Done);
        assert!(
            !(touches && state.reset),
            "{cta} touches counters that have been reset"
        );
        let mut take = |step, seen| self.take(step, &mut counters, seen);
        next.at[cta] = match state.at[cta] {
            At::Computing if cta < self.combiners => {
                take(raw::MLA_SPLIT_ARRIVE_COMBINER, 0);
                At::Waiting
            }
            At::Computing => after_arrival(take(raw::MLA_SPLIT_ARRIVE, 0)),
            At::Waiting => {
                let seen = take(raw::MLA_SPLIT_LOOK, 0);
                match take(raw::MLA_SPLIT_ROLE_OF, seen) as MlaSplitRole {
                    raw::MLA_SPLIT_SLICE => At::Slice,
                    raw::MLA_SPLIT_YIELD => At::Yielding,
                    raw::MLA_SPLIT_NONE if self.impatient => At::Impatient(seen),
                    raw::MLA_SPLIT_NONE => return None,
                    role => panic!("a combiner that looked has role {role}"),
                }
            }
            At::Impatient(seen) if take(raw::MLA_SPLIT_FALL_BACK, seen) != 0 => At::Yielding,
            At::Impatient(_) => At::Waiting,
            At::Yielding => after_arrival(take(raw::MLA_SPLIT_YIELDED, 0)),
            At::Slice => At::Combining {
                resets: take(raw::MLA_SPLIT_LEAVE, 0) == self.splits as i32,
            },
            At::Combining { resets } => {
                assert!(self.all_there(state), "a slice before all splits are there");
                next.combined[cta] += 1;
                if resets {
                    take(raw::MLA_SPLIT_RESET, 0);
                    next.reset = true;
                }
                At::Done
            }
            At::Leaving { everything } => {
                if take(raw::MLA_SPLIT_LEAVE, 0) == self.splits as i32 {
                    At::Resetting { everything }
                } else {
                    self.finish(state, &mut next, everything)
                }
            }
            At::Resetting { everything } => {
                take(raw::MLA_SPLIT_RESET, 0);
                next.reset = true;
                self.finish(state, &mut next, everything)
            }
            At::Done => return None,
        };
        (next.arrived, next.left) = (counters.arrived, counters.left);
        Some(next)
    }

    /// Takes the kernel's own step, and returns its answer.
    fn take(&self, step: MlaSplitStep, counters: &mut MlaSplitCounters, seen: i32) -> i32 {
        split_step(
            step,
            counters,
            (self.splits as i32, self.combiners as i32),
            seen,
        )
    }

    fn finish<const CTAS: usize>(
        &self,
        state: &State<CTAS>,
        next: &mut State<CTAS>,
        everything: bool,
    ) -> At {
        if everything {
            assert!(
                self.all_there(state),
                "everything before all splits are there"
            );
            for cta in 0..self.combiners {
                let kept = matches!(
                    state.at[cta],
                    At::Computing | At::Waiting | At::Impatient(_) | At::Yielding
                );
                assert!(!kept, "everything before {cta} has written its slice");
                next.combined[cta] += 1;
            }
        }
        At::Done
    }

    fn all_there<const CTAS: usize>(&self, state: &State<CTAS>) -> bool {
        state.at[..self.splits]
            .iter()
            .all(|at| *at != At::Computing)
    }

    /// Asserts that in a state without a next step every running CTA is done, and the counters are
    /// as before.
    fn check_end<const CTAS: usize>(&self, state: &State<CTAS>) {
        let running = (0..self.splits).filter(|&cta| self.frozen != Some(cta));
        for cta in running {
            assert_eq!(state.at[cta], At::Done, "{cta} waits for ever");
        }
        if self.frozen.is_none() {
            assert_eq!((state.arrived, state.left), (0, 0));
            assert!(state.reset);
            assert_eq!(state.combined[..self.combiners], vec![1; self.combiners]);
        } else {
            assert_eq!(
                state.combined, [0; CTAS],
                "without a split nothing can be combined"
            );
        }
    }
}

/// Takes the kernel's own step for a number of splits and combiners, and returns its answer.
fn split_step(
    step: MlaSplitStep,
    counters: &mut MlaSplitCounters,
    (splits, combiners): (i32, i32),
    seen: i32,
) -> i32 {
    let mut answer = 0;
    // SAFETY: counters and answer live on this stack, and the function accesses nothing else.
    let status =
        unsafe { raw::mla_split_step(step as i32, counters, splits, combiners, seen, &mut answer) };
    checked("mla_split_step", status).unwrap();
    answer
}

fn after_arrival(role: i32) -> At {
    match role as MlaSplitRole {
        raw::MLA_SPLIT_NONE => At::Leaving { everything: false },
        raw::MLA_SPLIT_EVERYTHING => At::Leaving { everything: true },
        role => panic!("a CTA that arrived or yielded has role {role}"),
    }
}

fn tiles() -> impl Iterator<Item = Tile> {
    // A tile has at least one combiner: only its last split may be followed by other work of the
    // same group.
    (2..=MAX).flat_map(|splits| {
        (1..=splits).map(move |combiners| Tile {
            splits,
            combiners,
            impatient: true,
            frozen: None,
        })
    })
}

#[test]
fn each_slice_is_combined_once_and_the_counters_end_at_zero_in_every_order() {
    let states: usize = tiles().map(|tile| tile.explore()).sum();
    // There are far more states than in one order, so falling back is among them.
    assert!(states > 10_000, "{states} states");
}

#[test]
fn no_cta_waits_for_ever_when_patience_does_not_end() {
    for mut tile in tiles() {
        tile.impatient = false;
        tile.explore();
    }
}

#[test]
fn no_cta_depends_on_one_that_does_not_run() {
    for mut tile in tiles() {
        for frozen in 0..tile.splits {
            tile.frozen = Some(frozen);
            tile.explore();
        }
    }
}

#[test]
fn random_orders_of_many_ctas_end_alike() {
    let mut rng = rand::rngs::StdRng::seed_from_u64(19);
    let (mut fallen, mut kept) = (0, 0);
    for run in 0..600 {
        let splits = rng.random_range(2..=MANY);
        let mut tile = Tile {
            splits,
            combiners: rng.random_range(1..=splits),
            impatient: true,
            frozen: (run % 4 == 0).then(|| rng.random_range(0..splits)),
        };
        let patience = 1 << rng.random_range(0..=20);
        match tile.walk(patience, &mut rng) {
            true => fallen += 1,
            false => kept += 1,
        }
    }
    // Some tiles fall back, and some do not.
    assert!(fallen > 100 && kept > 100, "{fallen} {kept}");
}

/// Maximum numbers of items and CTAs of a prefill launch in tests of every order.
const MAX_ITEMS: usize = 4;
const MAX_CTAS: usize = 3;
/// Number of items in tests of random orders.
const MANY_ITEMS: usize = 396;

/// State of a CTA of a prefill launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum InLaunch {
    /// A CTA that is not on the GPU yet.
    Outside,
    Claiming,
    /// A CTA that has claimed this item. `warps` of its warps have stored their results.
    Storing {
        item: usize,
        warps: usize,
    },
    /// A CTA that is about to check if it can combine its share, which has the number of this item.
    Waiting {
        item: usize,
    },
    Leaving,
    /// A CTA that left last, and resets the counters.
    Resetting,
    Ended,
}

/// State of a launch in which each split of each tile is an item. CTA `i % ctas` combines the share
/// of item `i`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LaunchState<const CTAS: usize, const ITEMS: usize> {
    claimed: usize,
    left: i32,
    /// The counter of each tile.
    arrived: [i32; ITEMS],
    at: [InLaunch; CTAS],
    combined: [u8; ITEMS],
}

impl<const CTAS: usize, const ITEMS: usize> LaunchState<CTAS, ITEMS> {
    const START: Self = Self {
        claimed: 0,
        left: 0,
        arrived: [0; ITEMS],
        at: [InLaunch::Outside; CTAS],
        combined: [0; ITEMS],
    };
}

struct Launch<'a> {
    ctas: usize,
    /// The number of CTAs that the GPU runs at the same time.
    resident: usize,
    /// The number of splits of each tile.
    splits: &'a [usize],
}

impl Launch<'_> {
    /// The number of warps of a CTA. Each arrives separately.
    const WARPS: usize = 2;

    fn items(&self) -> usize {
        self.splits.iter().sum()
    }

    /// Returns the tile of an item.
    fn tile(&self, mut item: usize) -> usize {
        self.splits
            .iter()
            .position(|&splits| {
                let own = item < splits;
                item = item.wrapping_sub(splits);
                own
            })
            .unwrap()
    }

    fn explore(&self) -> usize {
        let next = |state: &_| {
            let ctas = 0..self.ctas;
            ctas.filter_map(|cta| self.step(state, cta)).collect()
        };
        let start = LaunchState::<MAX_CTAS, MAX_ITEMS>::START;
        explore(start, next, |state| self.check_end(state))
    }

    /// Tries one random order, by drawing the CTA whose step is next.
    fn walk(&self, rng: &mut rand::rngs::StdRng) {
        let mut state = LaunchState::<MANY, MANY_ITEMS>::START;
        loop {
            let first = rng.random_range(0..self.ctas);
            let ctas = (0..self.ctas).map(|i| (first + i) % self.ctas);
            match ctas.into_iter().find_map(|cta| self.step(&state, cta)) {
                Some(next) => state = next,
                None => return self.check_end(&state),
            }
        }
    }

    fn step<const CTAS: usize, const ITEMS: usize>(
        &self,
        state: &LaunchState<CTAS, ITEMS>,
        cta: usize,
    ) -> Option<LaunchState<CTAS, ITEMS>> {
        let mut next = *state;
        next.at[cta] = match state.at[cta] {
            InLaunch::Outside => {
                let outside = |at: &&InLaunch| !matches!(at, InLaunch::Outside | InLaunch::Ended);
                let running = state.at[..self.ctas].iter().filter(outside).count();
                if running == self.resident {
                    return None;
                }
                InLaunch::Claiming
            }
            InLaunch::Claiming => {
                let item = state.claimed;
                next.claimed += 1;
                if item < self.items() {
                    InLaunch::Storing { item, warps: 0 }
                } else {
                    self.share_from(cta)
                }
            }
            InLaunch::Storing { item, warps } => {
                self.take(
                    raw::MLA_SPLIT_ARRIVE_COMBINER,
                    &mut next.arrived[self.tile(item)],
                );
                if warps + 1 < Self::WARPS {
                    let warps = warps + 1;
                    InLaunch::Storing { item, warps }
                } else {
                    InLaunch::Claiming
                }
            }
            InLaunch::Waiting { item } => {
                let tile = self.tile(item);
                let seen = self.take(raw::MLA_SPLIT_LOOK, &mut next.arrived[tile]);
                if (seen as usize) < self.splits[tile] * Self::WARPS {
                    return None;
                }
                let ctas = state.at[..self.ctas].iter();
                let mut stored = ctas.filter_map(|at| match at {
                    InLaunch::Storing { item, .. } => Some(self.tile(*item)),
                    _ => None,
                });
                assert!(
                    !stored.any(|stored| stored == tile),
                    "combines before all are there"
                );
                next.combined[item] += 1;
                self.share_from(item + self.ctas)
            }
            InLaunch::Leaving => {
                let mut counters = MlaSplitCounters {
                    arrived: 0,
                    left: state.left,
                };
                let left = split_step(raw::MLA_SPLIT_LEAVE, &mut counters, (1, 1), 0);
                next.left = counters.left;
                if left == self.ctas as i32 {
                    InLaunch::Resetting
                } else {
                    InLaunch::Ended
                }
            }
            InLaunch::Resetting => {
                let looks = |at: &InLaunch| !matches!(at, InLaunch::Resetting | InLaunch::Ended);
                assert!(
                    !state.at[..self.ctas].iter().any(looks),
                    "resets what others look at"
                );
                (next.claimed, next.left, next.arrived) = (0, 0, [0; ITEMS]);
                InLaunch::Ended
            }
            InLaunch::Ended => return None,
        };
        Some(next)
    }

    fn share_from(&self, item: usize) -> InLaunch {
        if item < self.items() {
            InLaunch::Waiting { item }
        } else {
            InLaunch::Leaving
        }
    }

    /// Takes the kernel's own step on a tile's counter, and returns its answer.
    fn take(&self, step: MlaSplitStep, arrived: &mut i32) -> i32 {
        let mut counters = MlaSplitCounters {
            arrived: *arrived,
            left: 0,
        };
        let answer = split_step(step, &mut counters, (1, 1), 0);
        *arrived = counters.arrived;
        answer
    }

    fn check_end<const CTAS: usize, const ITEMS: usize>(&self, state: &LaunchState<CTAS, ITEMS>) {
        for cta in 0..self.ctas {
            assert_eq!(state.at[cta], InLaunch::Ended, "{cta} waits for ever");
        }
        assert_eq!((state.claimed, state.left), (0, 0));
        assert_eq!(state.arrived, [0; ITEMS]);
        let combined = &state.combined[..self.items()];
        assert!(combined.iter().all(|&times| times == 1), "{combined:?}");
    }
}

#[test]
fn each_share_of_a_prefill_is_combined_once_however_few_ctas_run_at_a_time() {
    let mut states = 0;
    for splits in [&[2][..], &[3], &[4], &[2, 2]] {
        for ctas in 1..=MAX_CTAS {
            for resident in 1..=ctas {
                states += Launch {
                    ctas,
                    resident,
                    splits,
                }
                .explore();
            }
        }
    }
    assert!(states > 3_000, "{states} states");
}

#[test]
fn random_orders_of_a_prefill_combine_each_share_once() {
    let mut rng = rand::rngs::StdRng::seed_from_u64(25);
    for _ in 0..60 {
        let ctas = rng.random_range(1..=MANY);
        let resident = rng.random_range(1..=ctas);
        let max = rng.random_range(2..=128);
        let mut splits = Vec::new();
        while splits.iter().sum::<usize>() + max <= MANY_ITEMS {
            splits.push(rng.random_range(2..=max));
        }
        Launch {
            ctas,
            resident,
            splits: &splits,
        }
        .walk(&mut rng);
    }
}

#[test]
fn steps_that_do_not_exist_are_refused() {
    let mut counters = MlaSplitCounters {
        arrived: 0,
        left: 0,
    };
    let mut refusal = |step, splits, combiners| {
        // SAFETY: the counters live on this stack. No answer is asked for.
        let status = unsafe {
            raw::mla_split_step(
                step,
                &mut counters,
                splits,
                combiners,
                0,
                std::ptr::null_mut(),
            )
        };
        checked("mla_split_step", status)
    };
    refusal(0, 2, 1).unwrap();
    for (name, answer) in [
        ("step", refusal(8, 2, 1)),
        ("splits", refusal(0, 0, 0)),
        ("splits", refusal(0, 4096, 1)),
        ("combiners", refusal(0, 2, 3)),
        ("combiners", refusal(0, 2, 0)),
    ] {
        assert!(answer.unwrap_err().contains(name), "{name}");
    }
}
