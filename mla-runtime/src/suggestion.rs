//! Suggestions for misspelt names.

// Longer than every known name. It also bounds the time to compare a name with all others.
const LONGEST: usize = 64;

/// The name that is most similar to `given`, regardless of case; `None` if no name is similar.
pub(crate) fn nearest(
    given: &str,
    names: impl IntoIterator<Item = &'static str>,
) -> Option<&'static str> {
    if given.len() > LONGEST {
        return None;
    }
    let given = given.to_lowercase();
    names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&given, &name.to_lowercase()), name))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// Returns the given text, cut to the length of `LONGEST`.
pub(crate) fn shortened(given: &str) -> String {
    given.chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_name_is_suggested_and_no_other() {
        let names = ["FLASHMLA", "FLASH_ATTN", "CUDNN"];
        assert_eq!(nearest("flash_mla", names), Some("FLASHMLA"));
        assert_eq!(nearest("FLASH_ATN", names), Some("FLASH_ATTN"));
        assert_eq!(nearest("triton", names), None);
        assert_eq!(nearest("", names), None);
        assert_eq!(nearest(&"FLASHMLA".repeat(9), names), None);
        assert_eq!(shortened(&"x".repeat(100)).len(), 64);
    }
}
