//! Files of refused arguments, with parts of the message: each line is `ARGUMENTS => PART => PART`.
//! The lines of a sweep file are joined by ⏎.

/// Returns the arguments, and the parts of the message.
pub(crate) fn read(text: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    text.lines().map(|line| {
        let mut parts = line.split(" => ");
        (parts.next().unwrap_or_default(), parts.collect())
    })
}
