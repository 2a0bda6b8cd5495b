//! `mla bench compare`: says which rows of a result are faster than those of another, by rank and
//! by size.

use std::path::{Path, PathBuf};

use comfy_table::Cell;
use serde::Serialize;

use super::record::{Report, Row, SCHEMA};
use crate::args::Format;
use crate::args::input::read_json;
use crate::error::CliError;
use crate::table::{bold, counted, number, wide_table};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The earlier result, as --json wrote it.
    before: PathBuf,
    /// The later result, which may be better or worse.
    after: PathBuf,
    /// The accepted chance, over all rows together, of reporting a difference where there is none.
    #[arg(long, value_name = "P", default_value_t = 0.01, value_parser = part)]
    significance: f64,
    /// Minimum change of the median that matters, relative to the median.
    #[arg(long, value_name = "PART", default_value_t = 0.02, value_parser = part)]
    min: f64,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// Parses a number from 0 to 1.
fn part(text: &str) -> Result<f64, String> {
    let number = text
        .parse()
        .ok()
        .filter(|number| (0.0..1.0).contains(number));
    number.ok_or_else(|| format!("given {text:?}, accepted a number from 0 to below 1"))
}

#[derive(Serialize)]
struct Comparison {
    rows: Vec<Compared>,
    /// Rows of one result that are missing in the other.
    only_before: Vec<String>,
    only_after: Vec<String>,
    /// Differences between the two runs other than the times.
    differences: Vec<String>,
    /// The geometric mean over all rows of the time before divided by the time after.
    speedup: f64,
    slower: usize,
    faster: usize,
}

#[derive(Serialize)]
struct Compared {
    id: String,
    backend: String,
    before_us: f64,
    after_us: f64,
    /// Time before divided by time after.
    speedup: f64,
    /// The chance that samples of one distribution differ at least this much.
    p: f64,
    verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Faster,
    Slower,
    /// The times do not differ significantly, or by less than what matters.
    Same,
    /// One of the outputs is wrong, so its time means nothing.
    Wrong,
}

impl Verdict {
    const fn name(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "SLOWER",
            Self::Same => "same",
            Self::Wrong => "WRONG",
        }
    }
}

/// Returns the comparison, and true if nothing is slower or wrong.
pub(super) fn output(args: &Args) -> Result<(String, bool), CliError> {
    let (before, after) = (read(&args.before)?, read(&args.after)?);
    let comparison = compare(&before, &after, args.significance, args.min);
    if comparison.rows.is_empty() {
        return Err(CliError::Argument {
            argument: "results",
            given: "two without a row in common".to_owned(),
            accepted: "two with rows of the same case, kind and backend".to_owned(),
        });
    }
    let good = comparison
        .rows
        .iter()
        .all(|row| !matches!(row.verdict, Verdict::Slower | Verdict::Wrong));
    let text = args.format.write(&comparison, || comparison.describe(args));
    Ok((text, good))
}

fn read(path: &Path) -> Result<Report, CliError> {
    let refused = |message| CliError::file("result", path, message);
    let report: Report = read_json(path, "what mla bench --json wrote").map_err(refused)?;
    if report.schema != SCHEMA {
        return Err(refused(format!(
            "schema: given {}, accepted {SCHEMA}",
            report.schema
        )));
    }
    if let Some(row) = report.rows.iter().find(|row| row.samples_us.is_empty()) {
        return Err(refused(format!(
            "{}: given no samples, accepted at least one",
            row.id
        )));
    }
    Ok(report)
}

fn name(row: &Row) -> String {
    format!("{} {} by {}", row.kind, row.id, row.contender)
}

fn compare(before: &Report, after: &Report, significance: f64, min: f64) -> Comparison {
    fn rival<'a>(row: &Row, of: &'a Report) -> Option<&'a Row> {
        of.rows.iter().find(|other| name(other) == name(row))
    }
    let compared = |row: &Row| {
        let other = rival(row, after)?;
        Some(Compared {
            id: row.id.clone(),
            backend: row.contender.clone(),
            before_us: row.us.median,
            after_us: other.us.median,
            speedup: row.us.median / other.us.median,
            p: rank_test(&row.samples_us, &other.samples_us),
            verdict: match row.errors.pass && other.errors.pass {
                true => Verdict::Same,
                false => Verdict::Wrong,
            },
        })
    };
    let mut rows: Vec<Compared> = before.rows.iter().filter_map(compared).collect();
    judge(&mut rows, significance, min);
    let lacking = |of: &Report, other: &Report| -> Vec<String> {
        let lacking = of.rows.iter().filter(|row| rival(row, other).is_none());
        lacking.map(name).collect()
    };
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let logarithms: f64 = rows.iter().map(|row| row.speedup.ln()).sum();
    Comparison {
        only_before: lacking(before, after),
        only_after: lacking(after, before),
        differences: differences(before, after),
        speedup: (logarithms / rows.len() as f64).exp(),
        slower: count(Verdict::Slower),
        faster: count(Verdict::Faster),
        rows,
    }
}

/// Marks rows that differ by at least `min` and significantly. Significance follows Holm's
/// step-down method, since of many rows some would differ by chance.
fn judge(rows: &mut [Compared], significance: f64, min: f64) {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by(|a, b| rows[*a].p.total_cmp(&rows[*b].p));
    for (rank, index) in order.iter().enumerate() {
        let left = (rows.len() - rank) as f64;
        let row = &mut rows[*index];
        if row.p * left > significance {
            break;
        }
        let matters = (row.after_us / row.before_us - 1.0).abs() >= min;
        if row.verdict == Verdict::Same && matters {
            row.verdict = match row.speedup > 1.0 {
                true => Verdict::Faster,
                false => Verdict::Slower,
            };
        }
    }
}

/// Returns differences in the settings and the machine that may change the times.
fn differences(before: &Report, after: &Report) -> Vec<String> {
    let facts = |report: &Report| {
        let (machine, versions) = (&report.environment.machine, &report.environment.versions);
        [
            ("device", report.device.clone()),
            ("processor", format!("{:?}", machine.cpu)),
            ("threads", machine.threads.to_string()),
            ("driver", format!("{:?}", machine.gpu_driver)),
            ("commit", versions.git_commit.clone()),
            ("uncommitted changes", versions.git_dirty.clone()),
            ("compiler", versions.rustc.clone()),
            ("optimised", versions.optimised.to_string()),
            (
                "protocol",
                serde_json::to_string(&report.protocol).unwrap_or_default(),
            ),
        ]
    };
    facts(before)
        .into_iter()
        .zip(facts(after))
        .filter(|(before, after)| before != after)
        .map(|((what, before), (_, after))| format!("{what}: {before}, then {after}"))
        .collect()
}

/// Computes the two-sided rank test of Mann and Whitney.
///
/// The result is the chance that the ranks of two samples of one distribution differ at least this
/// much. It uses the normal approximation with corrections for ties and continuity.
fn rank_test(a: &[f64], b: &[f64]) -> f64 {
    let mut all: Vec<(f64, bool)> = a.iter().map(|x| (*x, true)).collect();
    all.extend(b.iter().map(|x| (*x, false)));
    all.sort_by(|x, y| x.0.total_cmp(&y.0));
    let (mut ranks_of_a, mut ties, mut below) = (0.0, 0.0, 0.0);
    for group in all.chunk_by(|x, y| x.0 == y.0) {
        let size = group.len() as f64;
        let rank = below + (size + 1.0) / 2.0;
        ranks_of_a += rank * group.iter().filter(|(_, of_a)| *of_a).count() as f64;
        ties += size.powi(3) - size;
        below += size;
    }
    let (n, m) = (a.len() as f64, b.len() as f64);
    let total = n + m;
    let u = ranks_of_a - n * (n + 1.0) / 2.0;
    let variance = n * m / 12.0 * (total + 1.0 - ties / (total * (total - 1.0)));
    if variance.is_nan() || variance <= 0.0 {
        return 1.0;
    }
    let z = ((u - n * m / 2.0).abs() - 0.5).max(0.0) / variance.sqrt();
    libm::erfc(z / std::f64::consts::SQRT_2)
}

impl Comparison {
    fn describe(&self, args: &Args) -> String {
        let columns = [
            "case", "backend", "before", "after", "speed-up", "p", "verdict",
        ];
        let mut table = wide_table(columns, 2..6);
        for row in &self.rows {
            let cells = [
                row.id.clone(),
                row.backend.clone(),
                number(row.before_us),
                number(row.after_us),
                format!("{:.3}", row.speedup),
                format!("{:.1e}", row.p),
                row.verdict.name().to_owned(),
            ];
            table.add_row(cells.map(|text| match row.verdict {
                Verdict::Same => Cell::new(text),
                _ => bold(Cell::new(text)),
            }));
        }
        let mut lines = vec![table.trim_fmt().to_string()];
        lines.push(format!(
            "{}: {} faster, {} slower, the others the same; speed-up {:.3} by geometric mean.\n\
             Times are medians in µs. A row differs where Mann and Whitney's rank test says so at \
             {} over all\nrows (Holm's correction), and its median by {:.0}% at least.",
            counted(self.rows.len() as u64, "row"),
            self.faster,
            self.slower,
            self.speedup,
            args.significance,
            100.0 * args.min
        ));
        let lists = [
            ("only in the first: ", &self.only_before),
            ("only in the second: ", &self.only_after),
            ("the runs differ in ", &self.differences),
        ];
        for (what, list) in lists {
            lines.extend(list.iter().map(|item| format!("{what}{item}")));
        }
        lines.join("\n") + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_test_is_that_of_the_tables() {
        // U = 0 for 5 and 5 samples gives z = 12 / √(25·11/12), two-sided.
        let (low, high) = ([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]);
        let p = rank_test(&low, &high);
        assert!((p - 0.012_186).abs() < 1e-5, "{p}");
        assert_eq!(rank_test(&high, &low), p);
        assert_eq!(rank_test(&low, &low), 1.0);
        // If there are only ties, there is no evidence.
        assert_eq!(rank_test(&[1.0; 9], &[1.0; 9]), 1.0);
        let few = rank_test(&[1.0], &[2.0]);
        assert!(few > 0.3, "{few}");
    }
}
