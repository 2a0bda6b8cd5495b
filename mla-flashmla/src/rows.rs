//! The rows of a call in FlashMLA's form. The query tokens and heads of a request are one list of
//! rows at one distance, and the work of a batch is divided into parts.

use mla_runtime::tensor::Layout;

use crate::ffi;

const WIDTH: usize = ffi::FM_WIDTH as usize;

/// The distances between requests and between rows, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Strides {
    pub(crate) request: usize,
    pub(crate) row: usize,
}

impl Strides {
    /// Returns the distances in queries without gaps.
    pub(crate) fn packed(rows: usize) -> Self {
        Self {
            request: rows * WIDTH,
            row: WIDTH,
        }
    }

    /// Returns the distances in queries `[tokens, heads, 576]` with `query_len` tokens for each
    /// request, or `None` if their rows have no common distance. For an axis of extent 1, this is
    /// the distance of packed rows, since the given distance may not be aligned.
    pub(crate) fn of(layout: &Layout, query_len: usize) -> Option<Self> {
        let [tokens, heads, _] = layout.shape;
        let [token, head, _] = layout.strides;
        let row = match (query_len, heads) {
            (1, 1) => WIDTH,
            (1, _) => head,
            (_, 1) => token,
            _ if token == heads * head => head,
            _ => return None,
        };
        let request = match tokens > query_len {
            true => query_len * token,
            false => query_len * heads * WIDTH,
        };
        Some(Self { request, row })
    }
}

/// Returns the number of parts that FlashMLA divides a batch into. Each part has a CTA for each
/// tile of rows.
pub(crate) fn parts(sms: usize, rows: usize) -> usize {
    let tiles = rows.div_ceil(ffi::FM_ROWS as usize).max(1);
    (sms / tiles).clamp(1, ffi::FM_MAX_PARTS as usize)
}

/// Returns the maximum number of rows of partial results, for a batch within these limits. There is
/// a row for each query token and head, and for each part there are the rows of a request.
pub(crate) fn partial_rows(sms: usize, heads: usize, [tokens, query_len]: [usize; 2]) -> usize {
    let of_parts = (sms * ffi::FM_ROWS as usize).max(query_len * heads);
    (tokens * heads).saturating_add(of_parts)
}

#[cfg(test)]
mod tests {
    use mla_runtime::model::DType;

    use super::*;

    fn strides(shape: [usize; 3], strides: [usize; 3], query_len: usize) -> Option<[usize; 2]> {
        let mut layout = Layout::contiguous(DType::BF16, shape);
        layout.strides = strides;
        Strides::of(&layout, query_len).map(|strides| [strides.request, strides.row])
    }

    #[test]
    fn rows_at_one_distance_are_taken_as_they_lie() {
        // The first has no gaps, and the second has gaps after each head.
        assert_eq!(strides([6, 4, 576], [2304, 576, 1], 3), Some([6912, 576]));
        assert_eq!(strides([6, 4, 576], [2400, 600, 1], 3), Some([7200, 600]));
        // With one token or one head, the distance along this axis does not matter.
        assert_eq!(strides([6, 4, 576], [9600, 600, 1], 1), Some([9600, 600]));
        assert_eq!(strides([6, 1, 576], [800, 7, 1], 3), Some([2400, 800]));
        // No row lies at these distances.
        assert_eq!(strides([1, 1, 576], [7, 7, 1], 1), Some([576, 576]));
        assert_eq!(strides([3, 4, 576], [2304, 576, 1], 3), Some([6912, 576]));
        // These have gaps after each token.
        assert_eq!(strides([6, 4, 576], [2400, 576, 1], 3), None);
        assert_eq!(
            Strides::packed(12),
            Strides {
                request: 6912,
                row: 576
            }
        );
    }

    #[test]
    fn the_partial_results_of_every_batch_have_room() {
        for sms in [1, 78, 132, 200] {
            for heads in [1, 16, 63, 128] {
                for query_len in [1, 2, 7, 130] {
                    for requests in [1, 3, 200] {
                        let rows = query_len * heads;
                        let parts = parts(sms, rows);
                        assert!((1..=160).contains(&parts));
                        let room = partial_rows(sms, heads, [requests * query_len, query_len]);
                        assert!(
                            (requests + parts) * rows <= room,
                            "{sms} {heads} {query_len}"
                        );
                    }
                }
            }
        }
    }
}
