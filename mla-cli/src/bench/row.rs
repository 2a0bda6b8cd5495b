//! The measurement of one contender on one case.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ceilings::Ceilings;
use super::check::Errors;
use super::job::Job;
use super::sampling::Measured;
use super::statistics::Summary;
use crate::cost::Cost;
use crate::error::CliError;
use crate::loaded::Loaded;
use crate::stopwatch::Conditions;

/// One contender on one case.
#[derive(Clone, Serialize, Deserialize)]
pub struct Row {
    /// The description of the case. Rows of the same case compete with each other.
    pub id: String,
    /// `decode`, `sparse` or `prefill` for attention alone, or `layer`.
    pub kind: String,
    /// The name of the contender.
    #[serde(rename = "impl")]
    pub contender: String,
    /// The batch in words.
    pub batch: String,
    pub parameters: BTreeMap<String, String>,
    pub requests: usize,
    pub tokens: usize,
    pub max_query_len: u32,
    pub max_kv_len: u32,
    /// The median, in microseconds and per layer, with everything that a step has to enqueue.
    pub e2e_us: f64,
    /// The same where the schedule exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_us: Option<f64>,
    /// All figures of `e2e_us`.
    pub us: Summary,
    pub tokens_per_second: f64,
    pub tflops: f64,
    pub gbps: f64,
    /// The time at the ceilings, relative to the median; absent without ceilings.
    pub of_limit: Option<f64>,
    pub peak_bytes: Option<u64>,
    pub errors: Errors,
    pub conditions: Conditions,
    /// The code that the driver loaded for the kernels, if they were replayed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loaded: Vec<Loaded>,
    pub cost: Cost,
    pub samples_us: Vec<f64>,
}

impl Row {
    pub fn new(
        job: &Job,
        measured: Measured,
        ceilings: Option<&Ceilings>,
    ) -> Result<Self, CliError> {
        let subject = &job.subject;
        let per_layer = 1e6 / subject.layers() as f64;
        let samples_us: Vec<f64> = measured
            .sampled
            .samples
            .iter()
            .map(|s| s * per_layer)
            .collect();
        let us = Summary::of(&samples_us);
        let (cost, seconds) = (subject.cost()?, us.median / 1e6);
        let requests = subject.requests();
        let tokens = requests.iter().map(|r| r.q as usize).sum();
        let dtype = subject.config().problem.dtype;
        let ceilings = ceilings.filter(|ceilings| ceilings.hold_for(dtype));
        let parameters = job.parameters.iter();
        Ok(Self {
            id: job.case.clone(),
            kind: subject.kind().to_owned(),
            contender: job.contender.clone(),
            batch: job.label.clone(),
            parameters: parameters
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
            requests: requests.len(),
            tokens,
            max_query_len: requests.iter().map(|r| r.q).max().unwrap_or(0),
            max_kv_len: requests.iter().map(|r| r.kv).max().unwrap_or(0),
            e2e_us: us.median,
            planned_us: measured.planned.map(|planned| planned.median * per_layer),
            us,
            tokens_per_second: tokens as f64 / seconds,
            tflops: cost.flop / seconds / 1e12,
            gbps: cost.bytes / seconds / 1e9,
            of_limit: ceilings.map(|ceilings| ceilings.seconds(cost) / seconds),
            peak_bytes: measured.sampled.peak_bytes,
            errors: measured.errors,
            conditions: measured.sampled.conditions,
            loaded: measured.sampled.loaded,
            cost,
            samples_us,
        })
    }
}
