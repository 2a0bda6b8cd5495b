//! The choice of a backend type at compile time.

use crate::backend::list::{CAPACITY, Listed};
use crate::select::tried_before;
use crate::spec::{BackendSpec, Phase, Problem, Target, both, on};
use crate::text::{Text, is_equal};

/// The type of the best prefill backend of a list, for a constant target and problem:
/// `best_prefill!(LIST, TARGET, PROBLEM)`.
///
/// The list is `[A, B]`, `[A, B, ..Rest]`, or a type made by [`backends!`](crate::backends). The
/// rules are those of [a selection](crate::select). If no backend fits, the program does not
/// compile. The error lists the reasons against each backend. [`dispatch`](crate::dispatch) has
/// examples.
#[macro_export]
macro_rules! best_prefill {
    ([$($list:tt)*], $target:expr, $problem:expr $(,)?) => {
        $crate::best_prefill!($crate::backends!($($list)*), $target, $problem)
    };
    ($list:ty, $target:expr, $problem:expr $(,)?) => {
        <$list as $crate::dispatch::Nth<{
            $crate::dispatch::choose(
                $crate::spec::Phase::Prefill,
                <$list as $crate::dispatch::PrefillList>::LISTED,
                $target,
                &$problem,
            )
        }>>::Backend
    };
}

/// The type of the best decode backend of a list, for a constant target and problem:
/// `best_decode!(LIST, TARGET, PROBLEM)`. The arguments are those of
/// [`best_prefill!`](crate::best_prefill).
#[macro_export]
macro_rules! best_decode {
    ([$($list:tt)*], $target:expr, $problem:expr $(,)?) => {
        $crate::best_decode!($crate::backends!($($list)*), $target, $problem)
    };
    ($list:ty, $target:expr, $problem:expr $(,)?) => {
        <$list as $crate::dispatch::Nth<{
            $crate::dispatch::choose(
                $crate::spec::Phase::Decode,
                <$list as $crate::dispatch::DecodeList>::LISTED,
                $target,
                &$problem,
            )
        }>>::Backend
    };
}

// The maximum length of a compile error. The rest of a longer one is cut off.
const LONGEST: usize = 16 * 1024;

/// The index of the best backend of a list. The macros of this module call it.
///
/// # Panics
///
/// If nothing fits, with the reasons; if the problem makes no sense; if two backends have one name;
/// or if the list is too long. In a constant this is a compile error.
pub const fn choose(
    phase: Phase,
    list: Option<&'static Listed>,
    target: Target,
    problem: &Problem,
) -> usize {
    check_names(phase, list);
    let mut bytes = [0; LONGEST];
    let mut text = Text::new(&mut bytes);
    if let Some(fault) = problem.fault() {
        fault.write(&mut text);
        panic!("{}", text.as_str());
    }
    text.parts(&[phase.name(), ": no backend fits on "]);
    target.write(&mut text);
    if list.is_none() {
        text.push(", because the list is empty: name the types of backends, as in `[A, B]`");
    }
    // In a list of one, the backend counts as asked for by name.
    let asked = matches!(list, Some(listed) if listed.next.is_none());
    let (mut index, mut best, mut rest) = (0, None::<(usize, &BackendSpec)>, list);
    while let Some(listed) = rest {
        let spec = listed.spec;
        let kernels = listed.kernels.availability(target, asked);
        let availability = both(on(listed.availability, target), kernels);
        let reasons = spec.reasons(target, problem, availability);
        text.parts(&["\n  ", spec.name, ": "]);
        reasons.write(&mut text);
        let is_better = match best {
            Some((_, best)) => tried_before(spec, best, target),
            None => true,
        };
        if is_better && reasons.is_empty() {
            best = Some((index, spec));
        }
        index += 1;
        rest = listed.next;
    }
    assert!(
        index <= CAPACITY,
        "list: given more than 32 backends, accepted at most 32: leave out those that cannot be \
         best"
    );
    match best {
        Some((index, _)) => index,
        None => panic!("{}", text.as_str()),
    }
}

const fn check_names(phase: Phase, list: Option<&'static Listed>) {
    let mut first = list;
    while let Some(listed) = first {
        let mut other = listed.next;
        while let Some(second) = other {
            if is_equal(listed.spec.name, second.spec.name) {
                let mut bytes = [0; 1024];
                let mut text = Text::new(&mut bytes);
                text.parts(&["name: given ", listed.spec.name, " for two ", phase.name()]);
                text.push(
                    " backends of the list, accepted one backend of a name. Leave one of them out, \
                     or give it another name with `name = \"…\"`",
                );
                panic!("{}", text.as_str());
            }
            other = second.next;
        }
        first = listed.next;
    }
}
