//! A step as a workspace stages it: facts of the plan for calls, and arrays that describe the step
//! to the device.

mod arrays;
mod context;
mod rows;

use std::ops::Range;

use self::rows::RowOrder;
use super::step_plan::StepPlan;
use crate::backend::{LayerConfig, PrefillBatch, StepLimits};
use crate::batch::Request;
use crate::model::QueryScaling;
use crate::plan::context::ContextChunk;
use crate::plan::limits::ArrayLayout;
use crate::plan::slots::SKIPPED;
use crate::room::{with_room, zeros};
use crate::spec::Problem;
use crate::{Error, Result};

/// A step as the host knows it, with the bytes of the device's arrays.
pub(super) struct StagedStep {
    limits: StepLimits,
    query_scaling: Option<QueryScaling>,
    layout: ArrayLayout,
    staging: Vec<u8>,
    pub(super) prepared: bool,
    pub(super) tokens: usize,
    /// The slot of each new token.
    slots: Vec<i64>,
    /// The slots that are written, sorted.
    written: Vec<i64>,
    requests: usize,
    /// The number of requests on the absorbed path. They come first.
    pub(super) absorbed_requests: usize,
    pub(super) absorbed_tokens: usize,
    max_absorbed_query_len: usize,
    max_seq_len: usize,
    /// The numbers of new tokens and of all tokens of each request on the absorbed path.
    absorbed_query_lens: Vec<u32>,
    absorbed_seq_lens: Vec<u32>,
    dense_within: u32,
    /// The number of new tokens of each request on the expanded path, and the index of its first
    /// new token on that path.
    expanded_query_lens: Vec<u32>,
    expanded_starts: Vec<usize>,
    /// The number of keys of each of these requests in the call for its new tokens: the new tokens,
    /// or also its context.
    expanded_key_lens: Vec<u32>,
    /// True if one causal call covers context and new tokens. There are no chunks then.
    context_in_one_call: bool,
    context: Vec<ContextChunk>,
    /// The start of each chunk's numbers in the array of chunks, and the end of the last.
    chunk_starts: Vec<usize>,
    pub(super) longest: usize,
    /// One more than the largest page number in the step. The cache must have at least this number
    /// of pages.
    pub(super) pages_end: usize,
    order: RowOrder,
    causal: bool,
}

impl StagedStep {
    pub(super) fn new(limits: &StepLimits, config: &LayerConfig) -> Result<Self> {
        let layout = ArrayLayout::new(limits, &config.problem)?;
        Ok(Self {
            limits: *limits,
            query_scaling: config.query_scaling,
            staging: zeros(layout.bytes())?,
            layout,
            prepared: false,
            tokens: 0,
            slots: with_room(limits.tokens)?,
            written: with_room(limits.tokens)?,
            requests: 0,
            absorbed_requests: 0,
            absorbed_tokens: 0,
            max_absorbed_query_len: 0,
            max_seq_len: 0,
            absorbed_query_lens: with_room(limits.requests)?,
            absorbed_seq_lens: with_room(limits.requests)?,
            dense_within: 0,
            expanded_query_lens: with_room(limits.requests)?,
            expanded_starts: with_room(limits.requests + 1)?,
            expanded_key_lens: with_room(limits.requests)?,
            context_in_one_call: false,
            context: Vec::new(),
            chunk_starts: vec![0],
            longest: 0,
            pages_end: 0,
            order: RowOrder::new(limits)?,
            causal: true,
        })
    }

    /// Stages a plan and writes the arrays. The plan may have been made for other layers and
    /// limits.
    pub(super) fn stage(&mut self, problem: &Problem, plan: &StepPlan) -> Result<()> {
        self.prepared = false;
        check_problem(problem, plan)?;
        self.check_limits(problem, plan)?;
        self.order.stage(plan)?;
        self.stage_lens(plan);
        self.stage_slots(plan)?;
        self.plan_context(problem, &plan.requests()[self.absorbed_requests..])?;
        self.write_arrays(plan);
        Ok(())
    }

    /// Refuses a plan that exceeds the limits.
    fn check_limits(&self, problem: &Problem, plan: &StepPlan) -> Result<()> {
        let limits = &self.limits;
        let requests = plan.requests();
        for (field, given, limit) in [
            ("requests", requests.len(), limits.requests),
            ("new tokens", plan.tokens(), limits.tokens),
        ] {
            if given > limit {
                let accepted = format!("at most the limit of {limit}");
                return Err(Error::argument(field, given, accepted));
            }
        }
        let longest = requests.iter().map(|r| r.kv).max().unwrap_or(0);
        let room = limits.pages_per_request * problem.page_size as usize;
        if longest as usize > room {
            let accepted = format!("at most {room} tokens, the limit of a request's pages");
            return Err(Error::argument("requests.total", longest, accepted));
        }
        let (absorbed, expanded) = requests.split_at(plan.absorbed);
        let longest = absorbed.iter().map(|r| r.q).max().unwrap_or(0);
        if longest as usize > limits.decode_query_len {
            let why = if problem.sparse {
                ": sparse attention has the absorbed form only, but for requests within \
                     dense_within"
            } else {
                ""
            };
            let limit = limits.decode_query_len;
            let accepted = format!("at most limits.decode_query_len = {limit}{why}");
            return Err(Error::argument("requests.new_tokens", longest, accepted));
        }
        let has_context = |r: &Request| r.q > 0 && (problem.sparse || r.context_len() > 0);
        if limits.context_rows == 0 && expanded.iter().any(has_context) {
            let accepted = "at least a page, for requests with context on the expanded path";
            return Err(Error::argument("limits.context_rows", 0, accepted));
        }
        Ok(())
    }

    /// Stores the lengths of the requests on each path.
    fn stage_lens(&mut self, plan: &StepPlan) {
        let requests = plan.requests();
        let (absorbed, expanded) = requests.split_at(plan.absorbed);
        // Less than 2³¹, as the check of the limits ensures.
        let room = (self.limits.pages_per_request * plan.problem.page_size as usize) as u32;
        let max_len = plan.max_len().map_or(0, |len| len.min(room));
        let longest = |lens: &mut dyn Iterator<Item = u32>| lens.max().unwrap_or(0) as usize;
        self.requests = requests.len();
        self.tokens = plan.tokens();
        self.longest = longest(&mut requests.iter().map(|r| r.q.max(r.kv))).max(max_len as usize);
        self.pages_end = plan.pages_end;
        self.causal = plan.is_causal();
        self.dense_within = plan.dense_within;

        self.absorbed_requests = absorbed.len();
        self.absorbed_tokens = absorbed.iter().map(|r| r.q as usize).sum();
        self.max_absorbed_query_len = longest(&mut absorbed.iter().map(|r| r.q));
        self.max_seq_len = longest(&mut absorbed.iter().map(|r| r.kv)).max(max_len as usize);
        replace(&mut self.absorbed_query_lens, absorbed.iter().map(|r| r.q));
        replace(&mut self.absorbed_seq_lens, absorbed.iter().map(|r| r.kv));

        replace(&mut self.expanded_query_lens, expanded.iter().map(|r| r.q));
        let lens = self.expanded_query_lens.iter().copied();
        let starts = starts(lens).map(|start| start as usize);
        replace(&mut self.expanded_starts, starts);
    }

    /// Stores the slots. Two tokens with one slot are refused: the last write would win, and on a
    /// GPU that could be either.
    fn stage_slots(&mut self, plan: &StepPlan) -> Result<()> {
        replace(&mut self.slots, plan.slots());
        if plan.has_own_pages() {
            return Ok(());
        }
        let written = self.slots.iter().copied().filter(|slot| *slot != SKIPPED);
        replace(&mut self.written, written);
        self.written.sort_unstable();
        match self.written.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(Error::argument(
                "slots",
                format!("slot {} twice", pair[0]),
                "slots that differ",
            )),
            None => Ok(()),
        }
    }

    /// Checks that a step was prepared.
    pub(super) fn check_prepared(&self) -> Result<()> {
        if self.prepared {
            return Ok(());
        }
        Err(Error::argument(
            "workspace",
            "one without a prepared step",
            "one whose last `prepare` succeeded",
        ))
    }

    pub(super) fn expanded_tokens(&self) -> usize {
        self.tokens - self.absorbed_tokens
    }

    /// The number of rows in a call's tensors.
    pub(super) fn call_rows(&self) -> usize {
        self.order.rows
    }

    /// The rows of the step's tokens, if they are in order.
    pub(super) fn rows_in_order(&self) -> Option<Range<usize>> {
        self.order.span.clone()
    }

    /// Returns true if the rows of a call's tensors are exactly those of the step's tokens in
    /// order.
    pub(super) fn is_packed(&self) -> bool {
        self.order.is_packed()
    }

    pub(super) fn context(&self) -> &[ContextChunk] {
        &self.context
    }

    pub(super) fn prefill_batch(&self) -> PrefillBatch<'_> {
        PrefillBatch {
            query_lens: &self.expanded_query_lens,
            key_lens: &self.expanded_key_lens,
            chunks: &self.context,
            causal: self.expanded_causal(),
        }
    }

    /// Returns true if tokens on the absorbed path see only the tokens up to themselves. A single
    /// new token sees its whole request in both cases.
    pub(super) fn absorbed_causal(&self) -> bool {
        self.causal || self.max_absorbed_query_len <= 1
    }

    /// Returns true if tokens on the expanded path see only the tokens up to themselves.
    pub(super) fn expanded_causal(&self) -> bool {
        self.causal || self.max_expanded_query_len() <= 1
    }

    pub(super) fn max_expanded_query_len(&self) -> usize {
        let longest = self.expanded_query_lens.iter().max();
        longest.map_or(0, |len| *len as usize)
    }

    pub(super) fn dense_within(&self) -> usize {
        self.dense_within as usize
    }
}

/// Refuses a plan for layers of another problem, if the difference affects the plan.
fn check_problem(problem: &Problem, plan: &StepPlan) -> Result<()> {
    let theirs = &plan.problem;
    let own = problem
        .with_page_size(theirs.page_size)
        .with_query_len(theirs.query_len)
        .with_sparse(theirs.sparse);
    if own != *problem {
        let (name, [accepted, given]) = problem.difference(&own).unwrap_or_default();
        let given = format!("one for {name} = {given}");
        let accepted = format!("one for {name} = {accepted}, as the layer has it");
        return Err(Error::argument("step", given, accepted));
    }
    if problem.sparse && !plan.is_causal() {
        let accepted = "true: a token of a sparse problem sees what its list names";
        return Err(Error::argument("causal", false, accepted));
    }
    Ok(())
}

/// Replaces the contents of a list.
fn replace<T>(list: &mut Vec<T>, values: impl Iterator<Item = T>) {
    list.clear();
    list.extend(values);
}

/// Returns the starts of consecutive parts with these lengths, and the end of the last.
fn starts(lens: impl Iterator<Item = u32>) -> impl Iterator<Item = i32> {
    let mut end = 0;
    std::iter::once(0).chain(lens.map(move |len| {
        end += len as i32;
        end
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::StepRequest;
    use crate::model::{DType, MlaDims};
    use crate::spec::QueryLen;

    fn problem(page_size: u32) -> Problem {
        Problem {
            page_size,
            query_len: QueryLen::Ragged,
            ..Problem::new(MlaDims::R1, 16, DType::BF16)
        }
    }

    #[test]
    fn arrays_keep_their_places_from_step_to_step() {
        let limits = StepLimits::new(3, 40, 5)
            .with_decode_query_len(2)
            .with_context_rows(32);
        let mut step = StagedStep::new(&limits, &LayerConfig::new(problem(16), 1.0)).unwrap();
        let pages = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]];
        let mut places = Vec::new();
        for lens in [[70, 0], [3, 80]] {
            let requests = [0, 1].map(|at| StepRequest::new(1, lens[at], &pages[at]));
            let plan = StepPlan::in_order(&problem(16), &limits, 2, 0, &requests).unwrap();
            let plan = plan.with_max_len(Some(80));
            step.stage(&problem(16), &plan).unwrap();
            // A graph would capture these: places, counts, and the longest length.
            places.push((
                format!("{:?}", step.layout),
                step.absorbed_requests,
                step.absorbed_tokens,
                step.max_absorbed_query_len,
                step.max_seq_len,
            ));
        }
        assert_eq!(places[0], places[1]);
        assert_eq!(places[0].4, 80);
    }
}
