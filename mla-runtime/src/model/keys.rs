//! Checks a configuration's keys against the tables of names.

use super::fields::{Fields, contradiction, shown, unknown_key};
use super::names;
use crate::Result;

/// Refuses unknown keys that may change the results, and spellings that disagree.
pub(super) fn check(fields: &Fields<'_>) -> Result<()> {
    let of_inference = |key: &str| {
        fields.is_of_inference() && names::OF_INFERENCE.iter().any(|(name, ..)| *name == key)
    };
    let is_known = |key: &str| names::is_known(key) || of_inference(key);
    for (path, object) in fields.levels() {
        for (key, value) in *object {
            let is_off =
                *value == false && names::SWITCHES.iter().any(|begin| key.starts_with(begin));
            if !value.is_null() && !is_off && names::is_suspect(key) && !is_known(key) {
                return Err(unknown_key(format!("{path}{key}"), shown(value)));
            }
        }
        for (name, others) in names::SPELLINGS {
            let of = |key: &&str| object.get(*key).filter(|value| !value.is_null());
            let given = [name].into_iter().chain(*others);
            let mut given = given.filter_map(|key| of(key).map(|value| (key, value)));
            let Some((first, value)) = given.next() else {
                continue;
            };
            if let Some((second, other)) = given.find(|(_, other)| !names::same(value, other)) {
                return Err(contradiction(
                    format!("{path}{first}"),
                    shown(value),
                    format!("{path}{second}"),
                    shown(other),
                ));
            }
        }
    }
    Ok(())
}
