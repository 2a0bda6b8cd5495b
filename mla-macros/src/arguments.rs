//! What stands in the attribute's parentheses: `key = value`, separated by commas.

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use syn::{Lit, LitStr, Path};

use crate::errors::{Errors, Fault, nearest};
use crate::key::{Form, KEYS, Key};
use crate::value;

/// The arguments of one attribute, each key at most once.
#[derive(Default)]
pub(crate) struct Arguments {
    arguments: Vec<Argument>,
    /// Keys that were probably meant by unknown ones.
    meant: Vec<Key>,
}

struct Argument {
    key: Key,
    span: Span,
    /// `None` where it could not be read; the key is still there, so that it is not reported as
    /// missing as well.
    value: Option<Value>,
}

enum Value {
    Text(String),
    Flag(bool),
    Path(Path),
    Paths(Vec<Path>),
}

impl Arguments {
    /// Reads every argument that can be read and reports the others.
    pub(crate) fn parse(tokens: TokenStream, errors: &mut Errors) -> Self {
        let mut this = Self::default();
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_comma =
            |token: &TokenTree| matches!(token, TokenTree::Punct(it) if it.as_char() == ',');
        // A comma after the last argument is as good as none.
        let arguments = match tokens.split_last() {
            None => return this,
            Some((last, rest)) if is_comma(last) && !rest.is_empty() => rest,
            Some(_) => &tokens,
        };
        for argument in arguments.split(is_comma) {
            match argument.split_first() {
                Some(_) => {
                    for (index, argument) in without_commas(argument).into_iter().enumerate() {
                        if index > 0 {
                            let (at, given) = match &argument[0] {
                                TokenTree::Punct(it) => (it.span(), "`;`".to_owned()),
                                key => (key.span(), format!("`{key}` without a comma before it")),
                            };
                            let fault = Fault::new(given, "a comma between two arguments");
                            errors.fault(at, "mla_backend", fault);
                        }
                        let argument = match argument {
                            [semicolon, argument @ ..] if index > 0 && is_semicolon(semicolon) => {
                                argument
                            }
                            _ => argument,
                        };
                        this.argument(&argument[0], &argument[1..], errors);
                    }
                }
                None => errors.fault(
                    tokens[0].span(),
                    "mla_backend",
                    Fault::new("a comma without an argument before it", "`key = value`"),
                ),
            }
        }
        this
    }

    fn argument(&mut self, first: &TokenTree, rest: &[TokenTree], errors: &mut Errors) {
        let TokenTree::Ident(ident) = first else {
            return errors.fault(
                first.span(),
                "mla_backend",
                Fault::new(
                    format!("`{first}`"),
                    "`key = value`, as in `sm = \"90|100\"`",
                ),
            );
        };
        let name = ident.to_string();
        let Some(key) = KEYS.iter().find(|key| key.name == name).copied() else {
            let meant = meant_by(&name);
            let accepted = KEYS
                .iter()
                .map(|key| key.name)
                .collect::<Vec<_>>()
                .join(", ");
            let fault = Fault::new(format!("unknown key `{name}`"), accepted);
            let fault = fault.meant(meant.map(|key| key.name));
            self.meant.extend(meant);
            return errors.fault(ident.span(), "mla_backend", fault);
        };
        if self.arguments.iter().any(|other| other.key == key) {
            return errors.fault(
                ident.span(),
                key.name,
                Fault::new("a second time", "each key once"),
            );
        }
        let (span, value) = match rest.split_first() {
            Some((TokenTree::Punct(equals), value))
                if equals.as_char() == '=' && !value.is_empty() =>
            {
                (span_of(value), read(value, key))
            }
            _ => {
                let given = match rest {
                    [] | [TokenTree::Punct(_)] => "no value".to_owned(),
                    rest => format!("`{}`", text_of(rest)),
                };
                (
                    ident.span(),
                    Err(Fault::new(given, kind(key)).hint(write(key, key.example))),
                )
            }
        };
        let value = value
            .map_err(|fault| errors.fault(span, key.name, fault))
            .ok();
        self.arguments.push(Argument { key, span, value });
    }

    fn get(&self, key: &Key) -> Option<&Argument> {
        self.arguments.iter().find(|argument| argument.key == *key)
    }

    /// Whether a key was written, whatever its value.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.get(key).is_some()
    }

    /// Whether a key was neither written nor meant.
    pub(crate) fn misses(&self, key: &Key) -> bool {
        !self.has(key) && !self.meant.contains(key)
    }

    /// Whether a key is absent, or has a value of the right kind.
    pub(crate) fn reads_well(&self, key: &Key) -> bool {
        self.get(key).is_none_or(|it| it.value.is_some())
    }

    /// Where a key's value stands, or the attribute where the key was not written.
    pub(crate) fn span(&self, key: &Key) -> Span {
        self.get(key).map_or_else(Span::call_site, |it| it.span)
    }

    /// The value of a key that takes a string.
    pub(crate) fn text(&self, key: &Key) -> Option<&str> {
        match self.get(key)?.value.as_ref()? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of a key that takes true or false.
    pub(crate) fn flag(&self, key: &Key) -> Option<bool> {
        match self.get(key)?.value {
            Some(Value::Flag(flag)) => Some(flag),
            _ => None,
        }
    }

    /// The value of a key that takes paths; none where it is not given.
    pub(crate) fn paths(&self, key: &Key) -> &[Path] {
        match self.get(key).and_then(|it| it.value.as_ref()) {
            Some(Value::Paths(paths)) => paths,
            _ => &[],
        }
    }

    /// The value of a key that takes a path.
    pub(crate) fn path(&self, key: &Key) -> Option<&Path> {
        match self.get(key)?.value.as_ref()? {
            Value::Path(path) => Some(path),
            _ => None,
        }
    }
}

// The key that an unknown name looks like, or what a newcomer may call it.
fn meant_by(name: &str) -> Option<Key> {
    let name = match name {
        "arch" | "archs" | "capability" | "capabilities" | "compute_capability" | "cc" => "sm",
        "types" | "precision" => "dtypes",
        "kv_cache" | "kv_format" | "kv_formats" | "cache" => "kv",
        "block_size" | "block_sizes" | "pages" => "page_sizes",
        "r1" => "requires_r1",
        "cfg" | "features_of_cargo" | "cargo_feature" => "feature",
        "targets" | "families" => "compiled",
        "tested_on" | "ran_on" => "run_on",
        _ => nearest(name, KEYS.iter().map(|key| key.name))?,
    };
    KEYS.iter().find(|key| key.name == name).copied()
}

// What stands between two commas, cut before each further `key =`, and before a semicolon that
// stands there in the place of the comma: no value has an equals sign.
fn without_commas(argument: &[TokenTree]) -> Vec<&[TokenTree]> {
    let mut parts = Vec::new();
    let mut start = 0;
    for index in 2..argument.len().saturating_sub(1) {
        let is_key = matches!(
            &argument[index..=index + 1],
            [TokenTree::Ident(_), TokenTree::Punct(equals)] if equals.as_char() == '='
        );
        let end = match &argument[index - 1] {
            semicolon if is_semicolon(semicolon) => index - 1,
            TokenTree::Punct(_) => continue,
            _ => index,
        };
        if is_key && end > start {
            parts.push(&argument[start..end]);
            start = end;
        }
    }
    parts.push(&argument[start..]);
    parts
}

fn is_semicolon(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Punct(it) if it.as_char() == ';')
}

// A value that a `macro_rules!` macro passed on stands in a group without delimiters.
fn ungrouped(tokens: &[TokenTree]) -> Vec<TokenTree> {
    match tokens {
        [TokenTree::Group(group)] if group.delimiter() == Delimiter::None => {
            ungrouped(&group.stream().into_iter().collect::<Vec<_>>())
        }
        _ => tokens.to_vec(),
    }
}

fn read(tokens: &[TokenTree], key: Key) -> Result<Value, Fault> {
    let tokens = ungrouped(tokens);
    let fault = || {
        let text = text_of(&tokens);
        let hint = match meant(&tokens, key) {
            Some(meant) => write(key, &format!("\"{meant}\"")),
            None => write(key, key.example),
        };
        Fault::new(format!("`{text}`"), kind(key)).hint(hint)
    };
    let literal = match tokens.as_slice() {
        [TokenTree::Literal(literal)] => Some(Lit::new(literal.clone())),
        [TokenTree::Ident(ident)] => match ident.to_string().as_str() {
            "true" => return flag(key, true).ok_or_else(fault),
            "false" => return flag(key, false).ok_or_else(fault),
            _ => None,
        },
        _ => None,
    };
    match (key.form, literal) {
        (Form::Text, Some(Lit::Str(text))) if text.suffix().is_empty() => {
            Ok(Value::Text(text.value()))
        }
        (Form::Text, Some(Lit::Int(number))) if number.suffix().is_empty() => {
            Ok(Value::Text(number.base10_digits().to_owned()))
        }
        (Form::Text, None) => match tokens.as_slice() {
            [TokenTree::Punct(minus), TokenTree::Literal(number)] if minus.as_char() == '-' => {
                match Lit::new(number.clone()) {
                    Lit::Int(number) if number.suffix().is_empty() => {
                        Ok(Value::Text(format!("-{}", number.base10_digits())))
                    }
                    _ => Err(fault()),
                }
            }
            _ => Err(fault()),
        },
        (Form::Path, Some(Lit::Str(text))) if text.suffix().is_empty() => text
            .parse_with(Path::parse_mod_style)
            .map(Value::Path)
            .map_err(|_| fault()),
        (Form::Path, None) => {
            syn::parse::Parser::parse2(Path::parse_mod_style, tokens.iter().cloned().collect())
                .map(Value::Path)
                .map_err(|_| fault())
        }
        (Form::Paths, Some(Lit::Str(text))) if text.suffix().is_empty() => {
            paths(&text).map(Value::Paths).map_err(|_| fault())
        }
        (Form::Paths, None) => {
            syn::parse::Parser::parse2(Path::parse_mod_style, tokens.iter().cloned().collect())
                .map(|path| Value::Paths(vec![path]))
                .map_err(|_| fault())
        }
        _ => Err(fault()),
    }
}

// Paths between `|` or `,`, of which a path has neither.
fn paths(text: &LitStr) -> syn::Result<Vec<Path>> {
    let value = text.value();
    let parse =
        |part: &str| LitStr::new(part.trim(), text.span()).parse_with(Path::parse_mod_style);
    value.split(['|', ',']).map(parse).collect()
}

// What the tokens would say in quotes, without brackets around them and quotes within: if the key
// takes it.
fn meant(tokens: &[TokenTree], key: Key) -> Option<String> {
    let unquoted = |tokens: &[TokenTree]| text_of(tokens).replace('"', "");
    let mut candidates = vec![unquoted(tokens)];
    if let [TokenTree::Group(group)] = tokens {
        candidates.push(unquoted(&group.stream().into_iter().collect::<Vec<_>>()));
    }
    let takes = |text: &String| key.form == Form::Text && value::accepts(&key, text);
    candidates.into_iter().find(takes)
}

fn flag(key: Key, flag: bool) -> Option<Value> {
    (key.form == Form::Flag).then_some(Value::Flag(flag))
}

fn write(key: Key, value: &str) -> String {
    format!("write `{} = {value}`", key.name)
}

fn kind(key: Key) -> String {
    match key.form {
        Form::Text => format!("a string: {}", key.accepted),
        Form::Flag => "true or false without quotes".to_owned(),
        Form::Path | Form::Paths => key.accepted.to_owned(),
    }
}

fn text_of(tokens: &[TokenTree]) -> String {
    tokens.iter().cloned().collect::<TokenStream>().to_string()
}

// All of the value's tokens, or its first where spans cannot be joined.
fn span_of(tokens: &[TokenTree]) -> Span {
    let first = tokens[0].span();
    let last = tokens[tokens.len() - 1].span();
    first.join(last).unwrap_or(first)
}
