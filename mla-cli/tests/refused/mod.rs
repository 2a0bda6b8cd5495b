//! Files of arguments that are refused, with what the message says of them: a line of each, as
//! `ARGUMENTS => PART => PART`. Of a sweep file, its lines stand in one line, with ⏎ between them.

/// The arguments, and the parts of the message.
pub(crate) fn read(text: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    text.lines().map(|line| {
        let mut parts = line.split(" => ");
        (parts.next().unwrap_or_default(), parts.collect())
    })
}
