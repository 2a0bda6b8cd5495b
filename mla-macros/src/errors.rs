//! The errors in a use of the attribute. They are collected, so that all are reported at once.

use std::fmt::Display;

use proc_macro2::{Span, TokenStream};
use quote::quote_spanned;

/// The given text, the accepted texts, and a hint. A fault has no source position, so values can be
/// parsed without one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub(crate) given: String,
    pub(crate) accepted: String,
    pub(crate) hint: Option<String>,
    /// The text that is wrong: the value or one of its elements.
    pub(crate) text: Option<String>,
}

impl Fault {
    pub(crate) fn new(given: impl Into<String>, accepted: impl Into<String>) -> Self {
        Self {
            given: given.into(),
            accepted: accepted.into(),
            hint: None,
            text: None,
        }
    }

    /// The fault of a text. A key's tables may later tell its probable meaning.
    pub(crate) fn of(text: &str, accepted: impl Into<String>) -> Self {
        Self {
            text: Some(text.to_owned()),
            ..Self::new(quoted(text), accepted)
        }
    }

    /// Adds a sentence that says what to do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the probable meaning, unless there already is a hint.
    pub(crate) fn meant(self, meant: Option<impl Display>) -> Self {
        match meant {
            Some(meant) if self.hint.is_none() => self.hint(format!("did you mean `{meant}`?")),
            _ => self,
        }
    }
}

/// The name that is most similar to `text`, if one is similar.
pub(crate) fn nearest<'a>(text: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Below this similarity, words have little in common but their letters.
    const NEAR: f64 = 0.7;
    let text = text.to_lowercase();
    names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&text, &name.to_lowercase()), name))
        .filter(|(similarity, _)| *similarity > NEAR)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, name)| name)
}

/// The errors so far.
#[derive(Default)]
pub(crate) struct Errors {
    messages: Vec<(Span, String)>,
}

impl Errors {
    /// Adds an error about `subject`, which is a key or the place of the attribute.
    pub(crate) fn fault(&mut self, span: Span, subject: &str, fault: Fault) {
        let hint = fault
            .hint
            .map(|hint| format!("; {hint}"))
            .unwrap_or_default();
        let (given, accepted) = (fault.given, fault.accepted);
        self.message(
            span,
            format!("{subject}: given {given}, accepted {accepted}{hint}"),
        );
    }

    /// Adds an error that is a whole sentence.
    pub(crate) fn message(&mut self, span: Span, message: impl Into<String>) {
        self.messages.push((span, message.into()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn texts(&self) -> Vec<&str> {
        self.messages
            .iter()
            .map(|(_, text)| text.as_str())
            .collect()
    }

    /// Writes a `compile_error!` for each error.
    pub(crate) fn to_tokens(&self) -> TokenStream {
        self.messages
            .iter()
            .map(|(span, message)| quote_spanned!(*span=> ::core::compile_error! { #message }))
            .collect()
    }
}

/// Puts `text` in quotes. Invisible characters are escaped.
pub(crate) fn quoted(text: &str) -> String {
    if text.is_empty() || text.trim() != text || text.chars().any(|c| c.is_control() || c == '`') {
        format!("{text:?}")
    } else {
        format!("`{text}`")
    }
}
