//! Sentences that are written both at run time and at compile time.
//!
//! `Display` does not work at compile time, but a compile error has to say why no backend fits. For
//! this reason `const fn`s write the parts of a reason into a [`Text`], and `Display` shows the
//! same text.

use std::fmt;

/// A text that is being written. It counts the whole length, even if the memory holds only the
/// beginning.
pub(crate) struct Text<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl<'a> Text<'a> {
    pub(crate) const fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, len: 0 }
    }

    pub(crate) const fn push(&mut self, text: &str) {
        let text = text.as_bytes();
        let mut i = 0;
        while i < text.len() {
            if self.len < self.bytes.len() {
                self.bytes[self.len] = text[i];
            }
            self.len += 1;
            i += 1;
        }
    }

    /// Writes the parts one after the other.
    pub(crate) const fn parts(&mut self, parts: &[&str]) {
        let mut i = 0;
        while i < parts.len() {
            self.push(parts[i]);
            i += 1;
        }
    }

    pub(crate) const fn number(&mut self, number: u32) {
        if number >= 10 {
            self.number(number / 10);
        }
        let digits = "0123456789".as_bytes();
        let (_, from) = digits.split_at((number % 10) as usize);
        let (digit, _) = from.split_at(1);
        if let Ok(digit) = std::str::from_utf8(digit) {
            self.push(digit);
        }
    }

    /// Writes a comma before every list item but the first; `index` is that of the item that
    /// follows.
    pub(crate) const fn comma(&mut self, index: usize) {
        if index > 0 {
            self.push(", ");
        }
    }

    /// Returns the part of the text that fits into the memory.
    pub(crate) const fn as_str(&self) -> &str {
        let held = if self.len < self.bytes.len() {
            self.len
        } else {
            self.bytes.len()
        };
        let (held, _) = self.bytes.split_at(held);
        match std::str::from_utf8(held) {
            Ok(text) => text,
            // The memory ends within a character: return the text before that character.
            Err(error) => {
                let (whole, _) = held.split_at(error.valid_up_to());
                match std::str::from_utf8(whole) {
                    Ok(text) => text,
                    Err(_) => "",
                }
            }
        }
    }
}

/// True if an item of a slice meets the condition. This and `list` are macros because constants
/// cannot yet call a function that is a parameter.
macro_rules! any {
    ($list:expr, |$item:ident| $condition:expr) => {{
        let (list, mut i, mut found) = ($list, 0, false);
        while i < list.len() && !found {
            let $item = list[i];
            found = $condition;
            i += 1;
        }
        found
    }};
}

/// Writes the items of a slice with commas between them; an expression writes one item.
macro_rules! list {
    ($list:expr, $text:ident, |$item:ident| $write:expr) => {{
        let (list, mut i) = ($list, 0);
        while i < list.len() {
            let $item = list[i];
            $text.comma(i);
            $write;
            i += 1;
        }
        if list.is_empty() {
            $text.push("none");
        }
    }};
}

/// Returns true if two texts are equal. Constants cannot use `==`.
pub(crate) const fn is_equal(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    if one.len() != other.len() {
        return false;
    }
    let mut i = 0;
    while i < one.len() {
        if one[i] != other[i] {
            return false;
        }
        i += 1;
    }
    true
}

/// Shows the text that `write` writes, of any length.
pub(crate) fn show(f: &mut fmt::Formatter<'_>, write: impl Fn(&mut Text<'_>)) -> fmt::Result {
    let mut short = [0; 256];
    let mut text = Text::new(&mut short);
    write(&mut text);
    if text.len <= text.bytes.len() {
        return f.write_str(text.as_str());
    }
    let mut long = vec![0; text.len];
    let mut text = Text::new(&mut long);
    write(&mut text);
    f.write_str(text.as_str())
}

/// Implements `Display` by the type's own `const fn write`.
macro_rules! display {
    ($($type:ty),*) => {$(
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::text::show(f, |text| self.write(text))
            }
        }
    )*};
}

/// Declares an enum whose values have names, and everything that lists them.
macro_rules! names {
    (
        $(#[$about:meta])*
        $vis:vis enum $type:ident {
            $($(#[$doc:meta])* $value:ident = $name:literal,)*
        }
    ) => {
        $(#[$about])*
        $vis enum $type {
            $($(#[$doc])* $value,)*
        }

        impl $type {
            /// Every value, in declaration order.
            $vis const ALL: &'static [Self] = &[$(Self::$value),*];

            /// The name used in attributes, on the command line and in JSON.
            $vis const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(crate) use {any, display, list, names};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal() {
        for number in [0, 7, 10, 105, u32::MAX] {
            let mut bytes = [0; 16];
            let mut text = Text::new(&mut bytes);
            text.number(number);
            assert_eq!(text.as_str(), number.to_string());
        }
    }

    #[test]
    fn what_does_not_fit_is_cut_between_characters() {
        for (capacity, want) in [
            (0, ""),
            (1, "a"),
            (2, "a"),
            (3, "aπ"),
            (4, "aπb"),
            (9, "aπb"),
        ] {
            let mut bytes = vec![0; capacity];
            let mut text = Text::new(&mut bytes);
            text.push("aπb");
            assert_eq!((text.as_str(), text.len), (want, 4), "{capacity}");
        }
    }

    #[test]
    fn long_texts_are_shown_whole() {
        struct Long;
        impl fmt::Display for Long {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                show(f, |text| {
                    for number in 0..1000 {
                        text.comma(number as usize);
                        text.number(number);
                    }
                })
            }
        }
        let want: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
        assert_eq!(Long.to_string(), want.join(", "));
    }
}
