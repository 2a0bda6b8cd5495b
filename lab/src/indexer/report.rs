//! The result of timing a sparse layer.

use comfy_table::Cell;
use mla_cli::parts::{Environment, ListErrors, Protocol, number, numbers, table};
use serde::Serialize;

use crate::peers::PeerOutput;
use crate::timing::{Row, describe};

#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) device: String,
    pub(crate) batch: String,
    pub(crate) backends: [String; 2],
    pub(crate) environment: Environment,
    pub(crate) protocol: Protocol,
    /// The number of query tokens whose logits are in memory at the same time. The parts of the
    /// selection are timed with this number of tokens.
    pub(crate) rows: usize,
    pub(crate) parts: Vec<Row>,
    pub(crate) lists: ListErrors,
    /// The largest error of sampled rows of the output.
    pub(crate) largest_error: f64,
    pub(crate) pass: bool,
    /// Times of other implementations for the same batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) beside: Option<PeerOutput>,
}

impl Report {
    pub(crate) fn describe(&self) -> String {
        let table = describe(&self.parts, None);
        let beside = self
            .beside
            .as_ref()
            .map_or_else(String::new, |theirs| self.describe_peers(theirs));
        let [prefill, decode] = &self.backends;
        let lists = &self.lists;
        format!(
            "{}, {} on {}; {prefill} and {decode}\n{}\nQueries, logits and lists: of {} tokens. \
             Lists: {} of {} identical with f64, the others by at most {:.1e} of a row's range \
             (accepted {:.0e}). Output: {:.1e}. {}\n{beside}",
            self.model,
            self.batch,
            self.device,
            table.trim_fmt(),
            self.rows,
            lists.identical,
            lists.lists,
            lists.largest_distance,
            lists.tolerance,
            self.largest_error,
            if self.pass {
                "All agree."
            } else {
                "They do not agree."
            },
        )
    }

    /// Returns a table of the peers' times, and of our time divided by each.
    fn describe_peers(&self, theirs: &PeerOutput) -> String {
        let mut table = table(["peer", "part", "µs", "of ours"]);
        numbers(&mut table, 2..4);
        for figures in &theirs.peers {
            let Some(us) = figures.e2e_us else { continue };
            let own = self.parts.iter().find(|part| {
                figures
                    .id
                    .starts_with(part.name.split(' ').next().unwrap_or(""))
            });
            let ratio = own.map(|part| number(us / (part.time.median * 1e6)));
            table.add_row([
                Cell::new(&figures.peer),
                Cell::new(&figures.id),
                Cell::new(number(us)),
                Cell::new(ratio.unwrap_or_default()),
            ]);
        }
        let refusals: String = theirs
            .refusals
            .iter()
            .map(|refusal| format!("{refusal}\n"))
            .collect();
        format!("{}\n{refusals}", table.trim_fmt())
    }
}
