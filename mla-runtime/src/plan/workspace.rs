//! Row budgets of the context workspace.

use super::parallel::ContextParallel;
use crate::{Error, Result};

/// The maximum that [`row_budget`] returns, before rounding. A larger workspace does not pay: with
/// 64 Ki rows a chunk is long enough for attention and expansion to run at full speed. The expanded
/// keys and values of DeepSeek-V3 (128 heads, bf16) then take about 5 GiB.
pub const MAX_ROWS: u64 = 65536;

/// The customary row budget W: min(max(8·`max_len`, 4·`max_requests`·`page`), 65536), rounded up to
/// the chunk alignment.
///
/// This budget suffices for eight requests of full length and for four pages of every request, up
/// to the cap of 65536 rows. The alignment is the page size, and under context parallelism
/// [a multiple of it](ContextParallel::alignment). The rounding comes last, so the result exceeds
/// 65536 if the alignment does not divide 65536.
///
/// `max_len` is the length of the longest sequence in tokens, `max_requests` the maximum number of
/// requests in a batch, and `page` the number of tokens in a cache page.
/// [`super::memory::max_rows`] instead gives the budget that fits into a number of bytes.
///
/// # Errors
///
/// If one of these three is zero, or if the result exceeds 32 bits.
pub fn row_budget(
    max_len: u32,
    max_requests: u32,
    page: u32,
    parallel: ContextParallel,
) -> Result<u32> {
    for (field, value) in [
        ("max_len", max_len),
        ("max_requests", max_requests),
        ("page", page),
    ] {
        if value == 0 {
            return Err(Error::argument(field, 0, "at least 1"));
        }
    }
    let by_length = 8 * u64::from(max_len);
    // Saturation does no harm: a number that exceeds 64 bits exceeds MAX_ROWS too.
    let by_requests = (4 * u64::from(max_requests)).saturating_mul(page.into());
    by_length
        .max(by_requests)
        .min(MAX_ROWS)
        .checked_next_multiple_of(parallel.alignment(page)?)
        .and_then(|rows| u32::try_from(rows).ok())
        .ok_or(Error::Overflow {
            quantity: "the row budget",
            limit: u32::MAX.into(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_budgets() {
        let single = ContextParallel::SINGLE;
        let dealt = ContextParallel::new(2, 48).unwrap();
        for (max_len, max_requests, page, parallel, rows) in [
            // Eight full-length requests.
            (1024, 1, 16, single, 8192),
            // Four pages per request.
            (16, 256, 16, single, 16384),
            // The cap.
            (163_840, 256, 64, single, 65536),
            (u32::MAX, u32::MAX, 64, single, 65536),
            // Rounded up to the page.
            (100, 1, 64, single, 832),
            // The rounding comes after the cap.
            (163_840, 1, 48, single, 65568),
            // lcm(64, 96) = 192.
            (100, 1, 64, dealt, 960),
        ] {
            assert_eq!(
                row_budget(max_len, max_requests, page, parallel),
                Ok(rows),
                "{max_len} {max_requests} {page} {parallel:?}"
            );
        }
    }

    #[test]
    fn refuses_zeroes_and_overflow() {
        let single = ContextParallel::SINGLE;
        let message = |a, b, c, parallel| row_budget(a, b, c, parallel).unwrap_err().to_string();
        assert_eq!(
            message(0, 1, 1, single),
            "max_len: given 0, accepted at least 1"
        );
        assert_eq!(
            message(1, 0, 1, single),
            "max_requests: given 0, accepted at least 1"
        );
        assert_eq!(
            message(1, 1, 0, single),
            "page: given 0, accepted at least 1"
        );
        assert_eq!(
            message(1, 1, 65537, ContextParallel::new(2, 65536).unwrap()),
            "the row budget: given more than fits, accepted at most 4294967295"
        );
    }
}
