//! Drafts of a request's next tokens. One step then verifies all of them.

/// Drafts the next tokens of a request.
///
/// They are at most `max` tokens that followed the last earlier occurrence of its last two tokens,
/// or else of its last token. Text often repeats itself. If it does not, there are no drafts to
/// verify.
pub fn propose(tokens: &[u32], max: usize) -> &[u32] {
    for length in [2, 1] {
        let Some(start) = tokens.len().checked_sub(length) else {
            continue;
        };
        let (before, last) = (&tokens[..tokens.len() - 1], &tokens[start..]);
        if let Some(at) = before.windows(length).rposition(|window| window == last) {
            let follows = &tokens[at + length..];
            return &follows[..follows.len().min(max)];
        }
    }
    &[]
}

/// Returns the number of drafts that the model agrees with. `best[i]` is the likeliest token after
/// draft i − 1, and `best[0]` is the likeliest token after the one before all drafts.
pub fn accepted(drafts: &[u32], best: &[u32]) -> usize {
    let agrees = |(draft, best): &(&u32, &u32)| draft == best;
    drafts.iter().zip(best).take_while(agrees).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_longest_match_is_continued() {
        assert_eq!(propose(&[1, 2, 3, 9, 2, 4, 1, 2], 2), [3, 9]);
        assert_eq!(propose(&[5, 2, 7, 2, 8, 2], 3), [8, 2]);
        assert_eq!(propose(&[4, 4], 3), [4]);
        assert!(propose(&[1, 2, 3], 3).is_empty() && propose(&[], 3).is_empty());
    }

    #[test]
    fn drafts_are_accepted_up_to_the_first_wrong_one() {
        assert_eq!(accepted(&[3, 9, 1], &[3, 9, 4, 4]), 2);
        assert_eq!(accepted(&[3], &[4, 4]), 0);
        assert_eq!(accepted(&[], &[4]), 0);
    }
}
