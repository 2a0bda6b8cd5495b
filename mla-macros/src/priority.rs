//! The order in which backends are tried.

use crate::capability::{self, Capabilities};
use crate::errors::{Fault, quoted};
use crate::key;
use crate::list::{self, Element};
use crate::number;

/// The runtime's `Priority`.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Priority {
    /// The first set that contains the capability decides.
    pub(crate) by_capability: Vec<(Capabilities, i32)>,
    /// The priority if no set contains the capability.
    pub(crate) otherwise: Option<i32>,
}

/// Reads the value of `priority`.
pub(crate) fn parse(text: &str, faults: &mut Vec<Fault>) -> Priority {
    let accepted = key::PRIORITY.accepted;
    if let Some(everywhere) = integer(text.trim_matches(' ')) {
        return Priority {
            by_capability: Vec::new(),
            otherwise: Some(everywhere),
        };
    }
    let mut priority = Priority::default();
    for element in list::elements(text, accepted, faults) {
        if let Err(fault) = add(&mut priority, element) {
            faults.push(fault);
        }
    }
    priority
}

fn add(priority: &mut Priority, element: Element<'_>) -> Result<(), Fault> {
    let (set, number) = read(&element)?;
    let Some(set) = set else {
        return match priority.otherwise.replace(number) {
            None => Ok(()),
            Some(_) => Err(Fault::new(
                format!("{}, a second `*`", element.given()),
                "each capability once",
            )),
        };
    };
    let earlier = priority.by_capability.iter();
    if let Some((wider, _)) = earlier.clone().find(|(wider, _)| wider.covers(set)) {
        let given = format!("{} behind `{wider}`", element.given());
        let fault = Fault::new(given, "a capability that no earlier one includes");
        let hint = "the first that matches decides, so write the narrower one first";
        return Err(fault.hint(hint));
    }
    if priority.otherwise.is_some() {
        return Err(
            Fault::new(format!("{} behind `*`", element.given()), "`*` at the end")
                .hint("`*` is everything that the others do not match"),
        );
    }
    priority.by_capability.push((set, number));
    Ok(())
}

/// Reads a priority and its set of capabilities, which is `None` for `*`.
fn read(element: &Element<'_>) -> Result<(Option<Capabilities>, i32), Fault> {
    let accepted = key::PRIORITY.accepted;
    let fault = element.fault(accepted);
    let Some((set, number)) = element.text.split_once(':') else {
        let is_set = capability::read(element.text).is_some() || element.text == "*";
        let hint = format!(
            "a priority stands behind a colon, as in `{}:100`",
            element.text
        );
        return Err(if is_set { fault.hint(hint) } else { fault });
    };
    let (set, number) = (set.trim_matches(' '), number.trim_matches(' '));
    let Some(number) = integer(number) else {
        let (min, max) = (i32::MIN, i32::MAX);
        let hint = format!("{} is no integer from {min} to {max}", quoted(number));
        return Err(fault.hint(hint));
    };
    if set == "*" {
        return Ok((None, number));
    }
    match capability::read(set) {
        Some(Capabilities::Any) => Err(fault.hint("everything else is written `*`")),
        Some(set) => Ok((Some(set), number)),
        None => {
            let hint = match capability::meant(set) {
                None | Some(Capabilities::Any) => format!("{} is no capability", quoted(set)),
                Some(meant) => format!("did you mean `{meant}:{number}`?"),
            };
            Err(fault.hint(hint))
        }
    }
}

fn integer(text: &str) -> Option<i32> {
    match text.strip_prefix('-') {
        Some(digits) => number::read::<i64>(digits).and_then(|n| i32::try_from(-n).ok()),
        None => number::read(text),
    }
}

/// The faults of priorities for capabilities that `sm` does not contain.
pub(crate) fn outside(priority: &Priority, sm: &[Capabilities]) -> Vec<Fault> {
    if sm == [Capabilities::Any] && !priority.by_capability.is_empty() {
        let fault = Fault::new("one per capability beside `sm = \"any\"`", "an integer");
        return vec![fault.hint("a processor has no compute capability")];
    }
    let texts: Vec<_> = sm.iter().map(|set| format!("`{set}`")).collect();
    priority
        .by_capability
        .iter()
        .filter(|(set, _)| !sm.iter().any(|supported| supported.overlaps(*set)))
        .map(|(set, number)| {
            Fault::new(
                format!("`{set}:{number}`, where the backend does not run"),
                format!("the capabilities of `sm`: {}", texts.join(", ")),
            )
        })
        .collect()
}
