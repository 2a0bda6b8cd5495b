//! The files that a benchmark writes.

use std::path::PathBuf;

use super::columns::csv;
use super::files::{Until, check_files, json, save};
use super::plot;
use super::report::Report;
use crate::error::CliError;

#[derive(clap::Args, Clone, Default)]
pub struct OutputArgs {
    /// File of the machine's ceilings, as `cargo lab ceilings` wrote it [default: the known ones].
    #[arg(long, value_name = "FILE")]
    pub ceilings: Option<PathBuf>,
    /// File for all results, samples included. It is written anew after each row.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// File for a line per row, which is added as soon as the row is measured.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// File for the drawings: roofline, time by the parameter that varies, crossover, whichever
    /// apply.
    #[arg(long, value_name = "FILE.svg|FILE.png")]
    pub plot: Option<PathBuf>,
}

impl OutputArgs {
    /// Refuses what could not be written, before anything is measured.
    pub fn check(&self) -> Result<(), CliError> {
        if let Some(path) = &self.plot {
            plot::check(path)?;
        }
        check_files([&self.json, &self.csv, &self.plot])
    }

    /// Writes every file of a finished run.
    pub fn write(&self, report: &Report) -> Result<(), CliError> {
        self.write_rows(report, Until::End)?;
        match &self.plot {
            Some(path) => plot::draw(path, report),
            None => Ok(()),
        }
    }

    /// Writes the files that hold a row each.
    pub fn write_rows(&self, report: &Report, until: Until) -> Result<(), CliError> {
        if let Some(path) = &self.json {
            save(path, until, &json(report))?;
        }
        match &self.csv {
            Some(path) => save(path, until, &csv(&report.rows)?),
            None => Ok(()),
        }
    }
}
