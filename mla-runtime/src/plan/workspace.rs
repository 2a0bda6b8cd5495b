//! Row budgets of the context workspace.

use crate::{Error, Result};

/// The maximum that [`row_budget`] returns, before rounding. A larger workspace does not pay: with
/// 64 Ki rows a chunk is long enough for attention and expansion to run at full speed. The expanded
/// keys and values of DeepSeek-V3 (128 heads, bf16) then take about 5 GiB.
pub const MAX_ROWS: u64 = 65536;

/// The customary row budget W: min(max(8·`max_len`, 4·`max_requests`·`page`), 65536), rounded up to
/// whole pages.
///
/// This budget suffices for eight requests of full length and for four pages of every request, up
/// to the cap of 65536 rows. The rounding comes last, so the result exceeds 65536 if the page size
/// does not divide 65536.
///
/// `max_len` is the length of the longest sequence in tokens, `max_requests` the maximum number of
/// requests in a batch, and `page` the number of tokens in a cache page.
/// [`super::memory::max_rows`] instead gives the budget that fits into a number of bytes.
///
/// # Errors
///
/// If one of these three is zero.
pub fn row_budget(max_len: u32, max_requests: u32, page: u32) -> Result<u32> {
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
    let rows = by_length.max(by_requests).min(MAX_ROWS);
    // At most 65535 more than the cap, or one page.
    Ok(rows.next_multiple_of(page.into()) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_budgets() {
        for (max_len, max_requests, page, rows) in [
            // Eight full-length requests.
            (1024, 1, 16, 8192),
            // Four pages per request.
            (16, 256, 16, 16384),
            // The cap.
            (163_840, 256, 64, 65536),
            (u32::MAX, u32::MAX, 64, 65536),
            // Rounded up to the page.
            (100, 1, 64, 832),
            // The rounding comes after the cap.
            (163_840, 1, 48, 65568),
        ] {
            assert_eq!(
                row_budget(max_len, max_requests, page),
                Ok(rows),
                "{max_len} {max_requests} {page}"
            );
        }
    }

    #[test]
    fn zeroes_are_refused() {
        let message = |a, b, c| row_budget(a, b, c).unwrap_err().to_string();
        assert_eq!(message(0, 1, 1), "max_len: given 0, accepted at least 1");
        assert_eq!(
            message(1, 0, 1),
            "max_requests: given 0, accepted at least 1"
        );
        assert_eq!(message(1, 1, 0), "page: given 0, accepted at least 1");
    }
}
