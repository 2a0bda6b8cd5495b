//! Mistakes of engines, case by case. Each is either refused, with the field's name and nothing
//! written, or gives the right result.
//!
//! `refusals.txt` has the error of each refused case. `BLESS=1 cargo test -p mla-cpu --test misuse`
//! writes it anew.

mod aligned;
mod attack;
mod calls;
mod cases;
mod reference;
#[path = "../common/refusals.rs"]
mod refusals;
mod setup;
mod steps;

use setup::Setup;

/// The result that a case must have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expected {
    /// An error. Neither the cache nor the output is changed.
    Refused,
    /// The same outputs as without the change.
    Right,
}

fn assert_same(name: &str, given: &[f32], expected: &[f32]) {
    let same = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
    let is_same = given.len() == expected.len() && given.iter().zip(expected).all(same);
    assert!(is_same, "{name}: other outputs");
}

#[test]
fn misuse() {
    let (expected, _) = Setup::default().run();
    let expected = expected.expect("the case without a change is right");
    let mut refused = refusals::Refused::new();
    for (name, kind, change) in cases::all() {
        let mut setup = Setup::default();
        change(&mut setup);
        let (given, touched) = setup.run();
        match (kind, given) {
            (Expected::Refused, given) => {
                assert!(!touched, "{name}: something was written");
                refused.push((name, given.map(drop)));
            }
            (Expected::Right, Ok(given)) => assert_same(&name, &given, &expected),
            (Expected::Right, Err(error)) => panic!("{name}: {error}"),
        }
    }
    refused.extend(steps::refused());
    for (name, case) in steps::RIGHT {
        match case() {
            Err(error) => panic!("{name}: {error}"),
            Ok([given, wanted]) => assert_same(name, &given, &wanted),
        }
    }
    refusals::compare("misuse/refusals.txt", refused);
}
