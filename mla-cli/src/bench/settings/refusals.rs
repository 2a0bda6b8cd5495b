//! Limits of the settings, whether arguments or a file gave them.

use super::Settings;
use crate::args::{MAX_LIST_WIDTH, MAX_SAMPLES};
use crate::error::CliError;

impl Settings {
    /// Refuses what a file of cases says itself.
    pub fn refuse_beside_cases(&self) -> Result<(), CliError> {
        let given = [
            ("SPEC", !self.batches.is_empty()),
            ("--range", !self.range.is_empty() || !self.ranges.is_empty()),
            ("--measure", self.measure.is_some()),
            ("--model", self.model.is_some()),
            ("--dims", self.dims.is_some()),
            ("--heads", self.heads.is_some()),
            ("--dtype", self.dtype.is_some()),
            ("--kv", self.kv.is_some()),
            ("--page", self.page.is_some()),
            ("--topk", self.topk.is_some()),
            ("--lists", self.lists.is_some()),
            ("--valid", self.valid.is_some()),
            ("--path", self.path.is_some()),
            ("--threshold", self.threshold.is_some()),
            ("--query-chunk", self.query_chunk.is_some()),
            ("--rows", self.rows.is_some()),
            ("--num-splits", self.num_splits.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((argument, _)) => Err(CliError::Argument {
                argument,
                given: "a value beside --cases".to_owned(),
                accepted: "one of the two: the file says what its cases are".to_owned(),
            }),
        }
    }

    /// Checks the settings of a file against the ranges that arguments are checked against when
    /// they are read. Returns the number that is refused, and the reason.
    pub fn number_out_of_range(&self) -> Option<String> {
        let many = |list: &Option<Vec<u32>>| list.clone().unwrap_or_default();
        let one = |number: Option<u32>| Vec::from_iter(number);
        let any = 1..=u32::MAX;
        let of_lists = 1..=MAX_LIST_WIDTH;
        let keys = [
            ("heads", many(&self.heads), any.clone()),
            ("page", many(&self.page), any.clone()),
            ("topk", many(&self.topk), of_lists.clone()),
            ("valid", many(&self.valid), of_lists),
            ("query_chunk", many(&self.query_chunk), any.clone()),
            ("rows", many(&self.rows), any.clone()),
            ("num_splits", many(&self.num_splits), any.clone()),
            ("layers", one(self.layers), any.clone()),
            ("samples", one(self.samples), 1..=MAX_SAMPLES),
            ("warm_up", one(self.warm_up), 0..=MAX_SAMPLES),
            ("check", one(self.check), any),
        ];
        keys.into_iter().find_map(|(key, numbers, accepted)| {
            let given = numbers
                .into_iter()
                .find(|number| !accepted.contains(number))?;
            let (min, max) = accepted.into_inner();
            Some(match max {
                u32::MAX => format!("{key}: given {given}, accepted {min} and up"),
                _ => format!("{key}: given {given}, accepted {min} to {max}"),
            })
        })
    }

    /// Refuses a value that stands twice on an axis: it would give the same rows again.
    pub fn refuse_repetitions(&self) -> Result<(), CliError> {
        fn repeated<T: PartialEq>(
            list: &Option<Vec<T>>,
            name: impl Fn(&T) -> String,
        ) -> Option<String> {
            let list = list.as_deref().unwrap_or_default();
            let mut values = list.iter().enumerate();
            let twice = values.find(|(index, value)| list[..*index].contains(value));
            twice.map(|(_, value)| name(value))
        }
        let text = |list| repeated(list, String::clone);
        let number = |list| repeated(list, u32::to_string);
        let axes = [
            ("model", text(&self.model)),
            ("dims", text(&self.dims)),
            ("heads", number(&self.heads)),
            ("dtype", text(&self.dtype)),
            ("kv", text(&self.kv)),
            ("page", number(&self.page)),
            ("topk", number(&self.topk)),
            (
                "lists",
                repeated(&self.lists, |lists| lists.name().to_owned()),
            ),
            ("valid", number(&self.valid)),
            ("backends", text(&self.backends)),
            ("prefill", text(&self.prefill)),
            ("decode", text(&self.decode)),
            ("path", repeated(&self.path, |path| path.name().to_owned())),
            ("threshold", number(&self.threshold)),
            ("query_chunk", number(&self.query_chunk)),
            ("rows", number(&self.rows)),
            ("num_splits", number(&self.num_splits)),
        ];
        let twice = axes
            .into_iter()
            .find_map(|(key, value)| Some((key, value?)));
        match twice {
            None => Ok(()),
            Some((argument, value)) => Err(CliError::Argument {
                argument,
                given: format!("{value} twice"),
                accepted: "each value once".to_owned(),
            }),
        }
    }
}
