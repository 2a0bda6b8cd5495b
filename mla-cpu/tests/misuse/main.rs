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
mod setup;
mod steps;

use std::fmt::Write as _;

use setup::Setup;

/// The result that a case must have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expected {
    /// An error. Neither the cache nor the output is changed.
    Refused,
    /// The same outputs as without the change.
    Right,
}

#[test]
fn misuse() {
    let (expected, _) = Setup::default().run();
    let expected = expected.expect("the case without a change is right");
    let mut said = String::new();
    let mut names = std::collections::BTreeSet::new();
    for (name, kind, change) in cases::all() {
        assert!(names.insert(name.clone()), "two cases are named {name}");
        let mut setup = Setup::default();
        change(&mut setup);
        let (given, touched) = setup.run();
        match (kind, given) {
            (Expected::Refused, Err(error)) => {
                assert!(!touched, "{name}: refused after something was written");
                writeln!(said, "{name}\n    {error}").unwrap();
            }
            (Expected::Right, Ok(given)) => {
                assert_eq!(given.len(), expected.len(), "{name}");
                let same = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
                assert!(
                    given.iter().zip(&expected).all(same),
                    "{name}: other outputs"
                );
            }
            (kind, given) => panic!("{name}: expected {kind:?}, given {:?}", given.map(drop)),
        }
    }
    let mut failed = Vec::new();
    for (name, case) in steps::REFUSED {
        assert!(
            names.insert((*name).to_owned()),
            "two cases are named {name}"
        );
        match case() {
            Err(error) => writeln!(said, "{name}\n    {error}").unwrap(),
            Ok(_) => failed.push(format!("{name}: not refused")),
        }
    }
    for (name, case) in steps::RIGHT {
        assert!(
            names.insert((*name).to_owned()),
            "two cases are named {name}"
        );
        let same = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
        match case() {
            Err(error) => failed.push(format!("{name}: {error}")),
            Ok([given, wanted]) => {
                let is_same = given.len() == wanted.len() && given.iter().zip(&wanted).all(same);
                if !is_same {
                    failed.push(format!("{name}: other outputs"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(names.len() >= 124 + 60, "{} cases", names.len());
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/misuse/refusals.txt");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&file, &said).unwrap();
    }
    let filed = std::fs::read_to_string(&file).unwrap_or_default();
    for (said, filed) in said.lines().zip(filed.lines()) {
        assert_eq!(
            said, filed,
            "tests/misuse/refusals.txt is to be written anew"
        );
    }
    assert_eq!(said.lines().count(), filed.lines().count());
}
