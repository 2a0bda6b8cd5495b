//! The arguments in the attribute's parentheses: `key = value`, separated by commas.

use proc_macro2::{Delimiter, Ident, Span, TokenStream, TokenTree};
use syn::{Lit, LitStr, Path};

use crate::capability;
use crate::errors::{Errors, Fault, nearest, quoted};
use crate::key::{self, Form, KEYS, Key};
use crate::place::compact;
use crate::synonym::{self, Meant};
use crate::value;

/// The arguments of one attribute, each key at most once.
#[derive(Default)]
pub(crate) struct Arguments {
    arguments: Vec<Argument>,
    /// The keys that unknown keys were probably meant to be.
    meant: Vec<Key>,
}

struct Argument {
    key: Key,
    span: Span,
    /// `None` if the value could not be read. The argument is kept, so that its key is not also
    /// reported as missing.
    value: Option<Value>,
}

enum Value {
    Text(String),
    Flag(bool),
    Paths(Vec<Path>),
}

impl Arguments {
    /// Reads every argument that can be read and reports the others.
    pub(crate) fn parse(tokens: TokenStream, errors: &mut Errors) -> Self {
        let mut this = Self::default();
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_comma =
            |token: &TokenTree| matches!(token, TokenTree::Punct(it) if it.as_char() == ',');
        // A comma after the last argument has no meaning.
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
            return self.unknown(ident, &name, errors);
        };
        if self.arguments.iter().any(|other| other.key == key) {
            return errors.fault(
                ident.span(),
                key.name,
                Fault::new("a second time", "each key once"),
            );
        }
        let (span, value) = match behind_equals(rest) {
            Some(value) => (span_of(value), read(value, key)),
            None => (ident.span(), Err(without_equals(rest, key))),
        };
        let value = value
            .map_err(|fault| errors.fault(span, key.name, fault))
            .ok();
        self.arguments.push(Argument { key, span, value });
    }

    fn unknown(&mut self, ident: &Ident, name: &str, errors: &mut Errors) {
        let accepted: Vec<_> = KEYS.iter().map(|key| key.name).collect();
        let fault = Fault::new(format!("unknown key `{name}`"), accepted.join(", "));
        let near = || {
            let name = nearest(name, KEYS.iter().map(|key| key.name))?;
            let key = KEYS.iter().find(|key| key.name == name).copied();
            Some((key, Meant::Value(name.into())))
        };
        let fault = match synonym::of_key(name).or_else(near) {
            Some((key, meant)) => {
                self.meant.extend(key);
                match meant {
                    Meant::Value(name) => fault.meant(Some(name)),
                    Meant::Advice(advice) => fault.hint(advice),
                }
            }
            None => fault,
        };
        errors.fault(ident.span(), "mla_backend", fault);
    }

    fn get(&self, key: &Key) -> Option<&Argument> {
        self.arguments.iter().find(|argument| argument.key == *key)
    }

    /// Returns true if the key was written, with any value.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.get(key).is_some()
    }

    /// Returns true if the key was neither written nor meant by another one.
    pub(crate) fn misses(&self, key: &Key) -> bool {
        !self.has(key) && !self.meant.contains(key)
    }

    /// Returns true if the key's value could be read, or if the key is absent so that its default
    /// applies.
    pub(crate) fn reads_well(&self, key: &Key) -> bool {
        match self.get(key) {
            Some(argument) => argument.value.is_some(),
            None => key.default.is_some() && !self.meant.contains(key),
        }
    }

    /// The location of a key's value. If the key was not written, it is the location of the
    /// attribute.
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

    /// The value of a key that takes paths; empty if it is not given.
    pub(crate) fn paths(&self, key: &Key) -> &[Path] {
        match self.get(key).and_then(|it| it.value.as_ref()) {
            Some(Value::Paths(paths)) => paths,
            _ => &[],
        }
    }

    /// The only path of a key's value.
    pub(crate) fn path(&self, key: &Key) -> Option<&Path> {
        self.paths(key).first()
    }
}

// Returns the tokens after the equals sign. Returns `None` for the beginning of `==` or `=>`.
fn behind_equals(rest: &[TokenTree]) -> Option<&[TokenTree]> {
    let (equals, value) = rest.split_first()?;
    let is = |token: &TokenTree, marks: &str| match token {
        TokenTree::Punct(mark) => marks.contains(mark.as_char()),
        _ => false,
    };
    let is_value = is(equals, "=") && !is(value.first()?, "=>");
    is_value.then_some(value)
}

// The fault of `key: value`, `key == value`, `key(value)`, `key value`, or of a key with nothing
// after it.
fn without_equals(rest: &[TokenTree], key: Key) -> Fault {
    let is_mark = |token: &TokenTree| match token {
        TokenTree::Punct(it) => ":=>-<".contains(it.as_char()),
        _ => false,
    };
    let marks = rest.iter().take_while(|token| is_mark(token)).count();
    let value = match &rest[marks..] {
        [TokenTree::Group(group)] => group.stream().into_iter().collect(),
        value => value.to_vec(),
    };
    if value.is_empty() {
        return Fault::new("no value", kind(key)).hint(write(key, key.example));
    }
    let accepted = format!("`=` and {}", kind(key));
    let hint = match read(&value, key) {
        Ok(_) => write(key, &text_of(&value)),
        Err(fault) => fault.hint.unwrap_or_default(),
    };
    Fault::new(format!("`{}`", text_of(rest)), accepted).hint(hint)
}

// Splits the tokens between two commas before each further `key =`. Also splits at a semicolon that
// replaces the comma. No value has an equals sign.
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

// Removes groups without delimiters, in which `macro_rules!` macros pass values on.
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
    let fault =
        || Fault::new(format!("`{}`", text_of(&tokens)), kind(key)).hint(hint(&tokens, key));
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
        (Form::Text, None) => negative(&tokens).map(Value::Text).ok_or_else(fault),
        (Form::Path | Form::Paths, literal) => {
            let is_quoted = literal.is_some();
            let paths = match literal {
                Some(Lit::Str(text)) if text.suffix().is_empty() => paths(&text).ok(),
                Some(_) => None,
                None => path(&tokens).map(|path| vec![path]),
            };
            let accepted = paths.filter(|paths| key.form == Form::Paths || paths.len() == 1);
            let paths = accepted.ok_or_else(fault)?;
            match paths
                .iter()
                .find_map(|path| no_constant(path, is_quoted, key))
            {
                Some(fault) => Err(fault),
                None => Ok(Value::Paths(paths)),
            }
        }
        _ => Err(fault()),
    }
}

// Reads a minus sign with a number without a suffix.
fn negative(tokens: &[TokenTree]) -> Option<String> {
    match tokens {
        [TokenTree::Punct(minus), TokenTree::Literal(number)] if minus.as_char() == '-' => {
            match Lit::new(number.clone()) {
                Lit::Int(number) if number.suffix().is_empty() => {
                    Some(format!("-{}", number.base10_digits()))
                }
                _ => None,
            }
        }
        _ => None,
    }
}

fn path(tokens: &[TokenTree]) -> Option<Path> {
    syn::parse::Parser::parse2(Path::parse_mod_style, tokens.iter().cloned().collect()).ok()
}

// The fault of a name that cannot be a constant, such as that of a target or a GPU. Without quotes,
// the name of a GPU may be that of a constant.
fn no_constant(path: &Path, is_quoted: bool, key: Key) -> Option<Fault> {
    let name = path.get_ident()?.to_string();
    let hint = match key {
        key::COMPILED if capability::meant(&name).is_some() && !value::is_upper_snake(&name) => {
            "mla-build writes a constant for each family; of kernels from elsewhere, write \
             `const TARGETS: &[&str] = &[\"sm_90a\"];` and `compiled = TARGETS`"
        }
        key::RUN_ON if is_quoted && capability::meant(&name).is_some() => {
            "write `const RUN_ON: &[Run] = &[…];` with a `Run` for each GPU, and `run_on = RUN_ON`"
        }
        _ => return None,
    };
    Some(Fault::new(quoted(&name), key.accepted).hint(hint))
}

// Reads paths that are separated by `|` or `,`. No path contains these characters.
fn paths(text: &LitStr) -> syn::Result<Vec<Path>> {
    let value = text.value();
    let parse =
        |part: &str| LitStr::new(part.trim(), text.span()).parse_with(Path::parse_mod_style);
    value.split(['|', ',']).map(parse).collect()
}

// The hint for tokens that are no value of the key.
fn hint(tokens: &[TokenTree], key: Key) -> String {
    let macro_call = |pair: &[TokenTree]| match pair {
        [TokenTree::Ident(name), TokenTree::Punct(mark)] => mark.as_char() == '!' && name != "vec",
        _ => false,
    };
    let is_macro = tokens.windows(2).any(macro_call);
    let is_flag = |name: &Ident| name == "true" || name == "false";
    let is_named = |token: &TokenTree| matches!(token, TokenTree::Ident(it) if !is_flag(it));
    let found = match is_macro {
        true => synonym::of_value(&key, &text_of(tokens)),
        false => meant(&unquoted(tokens), key),
    };
    match found {
        Some(Meant::Value(value)) => write(key, &literal(key, &value)),
        Some(Meant::Advice(advice)) => advice.into_owned(),
        None if is_macro => "macros are not expanded here: write the text itself".to_owned(),
        None if key.form == Form::Text && (tokens.iter().any(is_named) || tokens.len() > 2) => {
            NOT_EVALUATED.to_owned()
        }
        None => write(key, key.example),
    }
}

const NOT_EVALUATED: &str =
    "constants and expressions are not evaluated here: write the value itself";

// The texts that the tokens may mean. Quotes are removed, and also brackets around the text or a
// literal's prefix and suffix.
fn unquoted(tokens: &[TokenTree]) -> Vec<String> {
    let plain = |tokens: &[TokenTree]| text_of(tokens).replace('"', "");
    let mut texts = vec![plain(tokens)];
    match tokens {
        [.., TokenTree::Group(group)] => {
            texts.push(plain(&group.stream().into_iter().collect::<Vec<_>>()));
        }
        [TokenTree::Literal(literal)] => texts.extend(match Lit::new(literal.clone()) {
            Lit::Str(text) => Some(text.value()),
            Lit::ByteStr(bytes) => String::from_utf8(bytes.value()).ok(),
            Lit::CStr(text) => text.value().into_string().ok(),
            Lit::Char(letter) => Some(letter.value().to_string()),
            Lit::Int(number) => Some(number.base10_digits().to_owned()),
            Lit::Float(number) => Some(number.base10_digits().to_owned()),
            _ => None,
        }),
        _ => {}
    }
    texts
}

// The first of the texts that is a value. If there is none, the first whose meaning is known.
fn meant(texts: &[String], key: Key) -> Option<Meant> {
    let known = |text: &String| match key.form {
        Form::Text => value::mended(&key, text),
        Form::Flag => synonym::of_value(&key, text),
        Form::Path | Form::Paths => None,
    };
    let is_value = |text: &&String| key.form == Form::Text && value::accepts(&key, text);
    match texts.iter().find(is_value) {
        Some(text) => Some(Meant::Value(text.clone().into())),
        None => texts.iter().find_map(known),
    }
}

// Writes a value as an attribute has it. Numbers, true and false have no quotes.
fn literal(key: Key, value: &str) -> String {
    let is_bare = key.form == Form::Flag || value.bytes().all(|byte| byte.is_ascii_digit());
    match is_bare {
        true => value.to_owned(),
        false => format!("\"{value}\""),
    }
}

fn flag(key: Key, flag: bool) -> Option<Value> {
    (key.form == Form::Flag).then_some(Value::Flag(flag))
}

fn write(key: Key, value: &str) -> String {
    format!("write `{} = {value}`", key.name)
}

fn kind(key: Key) -> String {
    match key.form {
        // The usual value of these keys is a single number.
        Form::Text if !key.example.starts_with('"') => key.accepted.to_owned(),
        Form::Text => format!("a string: {}", key.accepted),
        Form::Flag => "true or false without quotes".to_owned(),
        Form::Path | Form::Paths => key.accepted.to_owned(),
    }
}

fn text_of(tokens: &[TokenTree]) -> String {
    compact(&tokens.iter().cloned().collect::<TokenStream>())
}

// The span of all tokens of the value. If spans cannot be joined, it is that of the first token.
fn span_of(tokens: &[TokenTree]) -> Span {
    let first = tokens[0].span();
    let last = tokens[tokens.len() - 1].span();
    first.join(last).unwrap_or(first)
}
