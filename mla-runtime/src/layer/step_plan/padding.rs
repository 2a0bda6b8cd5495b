//! Padding of a step to the number of requests of a captured graph.

use super::StepPlan;
use crate::batch::Request;
use crate::room::reserve;
use crate::{Error, Result};

impl StepPlan {
    /// Adds padding after the requests with new tokens on the absorbed path, until there are
    /// `requests` requests in all. A graph captured for that number needs it. Each padding request
    /// has the same number of new tokens as those requests. Padding attends to nothing and writes
    /// nothing. The rows of the expanded path come after it.
    ///
    /// # Errors
    ///
    /// If the step already has more requests, if the limits have no room for that number, if the
    /// absorbed path's requests differ in length, or if the host lacks memory. Also if the step
    /// already has the engine's own rows: add padding first.
    pub fn padded_to(mut self, requests: usize) -> Result<Self> {
        let own = self.requests.len();
        if !(own..=self.limit).contains(&requests) {
            let accepted = format!("{own}, as the step has, to the limit of {}", self.limit);
            return Err(Error::argument("requests", requests, accepted));
        }
        let missing = requests - own;
        if missing == 0 {
            return Ok(self);
        }
        if self.own_rows.is_some() {
            let accepted = "none yet: padded_to comes before rows of the engine's own";
            return Err(Error::argument("rows", "those of a step", accepted));
        }
        let absorbed = &self.requests[..self.absorbed];
        let place = absorbed
            .iter()
            .rposition(|r| r.q > 0)
            .map_or(0, |at| at + 1);
        let mut lens = absorbed.iter().map(|r| r.q).filter(|len| *len > 0);
        let len = lens.next().filter(|len| lens.all(|other| other == *len));
        let Some(len) = len else {
            let given = format!("{place} on the absorbed path");
            let accepted = "some, all of one number of new tokens, for padding to have it too";
            return Err(Error::argument("requests", given, accepted));
        };
        self.insert_padding(place, missing, len)?;
        Ok(self)
    }

    fn insert_padding(&mut self, place: usize, count: usize, len: u32) -> Result<()> {
        let entries = count.saturating_mul(self.max_pages);
        reserve(&mut self.requests, count)?;
        reserve(&mut self.tables, entries)?;
        let tokens = count.saturating_mul(len as usize);
        if let Some(written) = &mut self.written {
            reserve(written, tokens)?;
            let before: usize = self.requests[..place].iter().map(|r| r.q as usize).sum();
            written.splice(before..before, std::iter::repeat_n(false, tokens));
        }
        for at in place..self.requests.len() {
            let number = self.number(at);
            let rows = &mut self.rows[number];
            *rows = rows.start.saturating_add(tokens)..rows.end.saturating_add(tokens);
        }
        let padding = std::iter::repeat_n(Request::new(len, 0), count);
        self.requests.splice(place..place, padding);
        let entry = place * self.max_pages;
        let pages = std::iter::repeat_n(0, entries);
        self.tables.splice(entry..entry, pages);
        self.padding = place - self.padding.len()..place + count;
        self.absorbed += count;
        Ok(())
    }

    /// The number of the request at a place of the layer's order. Padding has the numbers after
    /// those of the other requests.
    pub(super) fn number(&self, at: usize) -> usize {
        match at.checked_sub(self.padding.start) {
            None => self.order[at],
            Some(behind) if behind < self.padding.len() => self.order.len() + behind,
            Some(_) => self.order[at - self.padding.len()],
        }
    }
}
