//! Checks of a step's requests, and of their pages.

use std::collections::HashMap;
use std::fmt::Display;

use super::StepRequest;
use crate::backend::StepLimits;
use crate::plan::slots::page_of;
use crate::spec::Problem;
use crate::{Error, Result, room};

/// The origin of a plan's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::layer) enum Origin {
    /// An engine's requests, in any order. Each writes to pages of its own, and none is padding.
    Engine,
    /// Requests in order, with padding, and with pages to which several may write.
    Raw,
}

/// Refuses requests that contradict themselves. Returns the pages that they use, one request's
/// behind the other's. Each entry is converted once, since a foreign type may give another number
/// each time.
pub(super) fn requests<T: Copy + Display + TryInto<i64>>(
    problem: &Problem,
    limits: &StepLimits,
    requests: &[StepRequest<'_, T>],
    origin: Origin,
) -> Result<Vec<i32>> {
    if requests.len() > limits.requests {
        let accepted = format!("at most the limit of {}", limits.requests);
        return Err(Error::argument("requests", requests.len(), accepted));
    }
    let page = problem.page_size;
    if page == 0 {
        return Err(Error::argument("page_size", 0, "1 and up"));
    }
    let used = requests
        .iter()
        .map(|request| request.used(page).min(request.pages.len()));
    let (mut tokens, mut pages) = (0usize, room::with_room(used.sum())?);
    for (index, request) in requests.iter().enumerate() {
        check_lens(index, request, limits, page, origin)?;
        tokens = tokens.saturating_add(request.new_tokens as usize);
        for (place, entry) in request.pages[..request.used(page)].iter().enumerate() {
            pages.push(page_of(*entry).map_err(|accepted| {
                let given = format!("{entry} at [{index}][{place}]");
                Error::argument("requests.pages", given, accepted)
            })?);
        }
    }
    if tokens > limits.tokens {
        let accepted = format!("at most the limit of {}", limits.tokens);
        return Err(Error::argument("new tokens", tokens, accepted));
    }
    Ok(pages)
}

/// Refuses requests of which one writes a page that another one writes, or reads at a different
/// index. They have the pages that they use, and no others.
pub(super) fn check_pages(page: u32, requests: &[StepRequest<'_>]) -> Result<()> {
    check_reads(requests, &writers(page, requests)?)
}

/// Refuses a request whose tokens and pages contradict each other.
fn check_lens<T>(
    index: usize,
    request: &StepRequest<'_, T>,
    limits: &StepLimits,
    page: u32,
    origin: Origin,
) -> Result<()> {
    let (new, total) = (request.new_tokens, request.total);
    let refused = |accepted| {
        let given = format!("{total} of request {index}");
        Err(Error::argument("requests.total", given, accepted))
    };
    match origin {
        Origin::Engine if total < new => return refused(format!("at least its {new} new tokens")),
        Origin::Raw if (1..new).contains(&total) => {
            return refused(format!("at least its {new} new tokens, or 0 for padding"));
        }
        Origin::Engine | Origin::Raw => {}
    }
    let needed = request.used(page);
    if needed > limits.pages_per_request {
        let max = limits.pages_per_request.saturating_mul(page as usize);
        return refused(format!(
            "at most {max} tokens, the limit of a request's pages"
        ));
    }
    if request.pages.len() < needed {
        let given = format!("{} of request {index}", request.pages.len());
        let accepted = format!("at least {needed}, for {total} tokens");
        return Err(Error::argument("requests.pages", given, accepted));
    }
    Ok(())
}

/// Returns the request that writes each page, and the index of the page in that request. Refuses a
/// second writer of a page.
fn writers(page: u32, requests: &[StepRequest<'_>]) -> Result<HashMap<i32, (usize, usize)>> {
    let mut writers = HashMap::new();
    for (index, request) in requests.iter().enumerate() {
        if request.new_tokens == 0 {
            continue;
        }
        let first = ((request.total - request.new_tokens) / page) as usize;
        for (place, entry) in (first..).zip(&request.pages[first..]) {
            if let Some((other, _)) = writers.insert(*entry, (index, place)) {
                let given = format!("page {entry} of request {index}, which {other} writes too");
                let accepted = "pages to write that no other request of the step writes";
                return Err(Error::argument("requests.pages", given, accepted));
            }
        }
    }
    Ok(writers)
}

/// Refuses a page that one request writes and another one reads at a different index. The new
/// tokens would overwrite tokens that the other request attends to. At the same index the page is a
/// shared prefix. The same step may write and read it.
fn check_reads(requests: &[StepRequest<'_>], writers: &HashMap<i32, (usize, usize)>) -> Result<()> {
    // A step writes few of the pages. Sixteen bits for each written page are enough to recognise
    // almost all other pages quickly.
    let bits = (16 * writers.len()).next_power_of_two().max(64);
    let mut marks = vec![0u64; bits / 64];
    let bit = |entry: i32| (entry as u32).wrapping_mul(0x9e37_79b1) as usize % bits;
    for entry in writers.keys() {
        marks[bit(*entry) / 64] |= 1 << (bit(*entry) % 64);
    }
    for (index, request) in requests.iter().enumerate() {
        if request.new_tokens == 0 {
            continue;
        }
        for (place, &entry) in request.pages.iter().enumerate() {
            if marks[bit(entry) / 64] >> (bit(entry) % 64) & 1 == 0 {
                continue;
            }
            match writers.get(&entry) {
                Some((writer, at)) if *at != place => {
                    let given = format!(
                        "page {entry} at [{index}][{place}], which request {writer} writes at \
                         [{writer}][{at}]"
                    );
                    let accepted = "a page that holds the same tokens in every request that has it";
                    return Err(Error::argument("requests.pages", given, accepted));
                }
                _ => {}
            }
        }
    }
    Ok(())
}
