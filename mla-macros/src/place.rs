//! The `impl` block that has the attribute.

use heck::ToShoutySnakeCase;
use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream, Parser};
use syn::spanned::Spanned;
use syn::{
    Attribute, GenericArgument, GenericParam, Generics, PathArguments, Token, Type, Visibility,
    WhereClause,
};

use crate::errors::{Errors, Fault, nearest};

/// The phase whose trait is implemented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Prefill,
    Decode,
}

impl Phase {
    /// The name of the variant in the runtime's enum.
    pub(crate) fn variant(self) -> &'static str {
        match self {
            Self::Prefill => "Prefill",
            Self::Decode => "Decode",
        }
    }

    /// The name of the trait.
    pub(crate) fn backend(self) -> &'static str {
        match self {
            Self::Prefill => "PrefillBackend",
            Self::Decode => "DecodeBackend",
        }
    }
}

const PHASES: [Phase; 2] = [Phase::Prefill, Phase::Decode];

/// The block `impl Trait for Type { … }`. The body stays as it was written.
pub(crate) struct Place {
    pub(crate) attributes: Vec<Attribute>,
    /// The tokens from `impl` up to the braces.
    pub(crate) head: TokenStream,
    pub(crate) phase: Phase,
    pub(crate) self_type: Type,
    /// True if the block has parameters. They are an error of their own, and without them the rest
    /// of the block makes no sense.
    pub(crate) generic: bool,
    pub(crate) body: Group,
}

/// The item that may have the attribute, in the words of error messages.
const BELONGS: &str = "`impl PrefillBackend for T` or `impl DecodeBackend for T`";

impl Place {
    /// Reads the item, or reports why it cannot have the attribute. In that case the function
    /// returns the rest of the item, or nothing if the compiler would report the same fault again.
    pub(crate) fn parse(item: TokenStream, errors: &mut Errors) -> Result<Self, TokenStream> {
        let head = match Head::parse.parse2(item.clone()) {
            Ok(head) => head,
            Err(error) => {
                errors.message(error.span(), format!("mla_backend: {error}"));
                return Err(item);
            }
        };
        match head {
            Head::Impl(block) => block.place(item, errors),
            Head::Other { span, what } => {
                errors.fault(span, "mla_backend", Fault::new(what, BELONGS));
                Err(item)
            }
        }
    }

    /// The type's name in upper snake case. `None` if the type has no name of its own: it is no
    /// path, or one of several instances of a generic type.
    pub(crate) fn default_name(&self) -> Option<String> {
        let Type::Path(path) = ungrouped(&self.self_type) else {
            return None;
        };
        let last = path.path.segments.last()?;
        let named = path.qself.is_none() && has_one_instance(&last.arguments);
        let name = last.ident.to_string();
        named.then(|| name.trim_start_matches("r#").to_shouty_snake_case())
    }

    // Replaces these lifetimes, and those that the type elides, by `'static`.
    fn give_static(&mut self, mut lifetimes: Vec<String>) {
        let span = self.body.span();
        let stream = with_static(self.body.stream(), &lifetimes);
        self.body = Group::new(Delimiter::Brace, stream);
        self.body.set_span(span);
        lifetimes.push("_".to_owned());
        let ty = with_static(self.self_type.to_token_stream(), &lifetimes);
        self.self_type = syn::parse2(ty.clone()).unwrap_or(Type::Verbatim(ty));
    }

    /// Reports constants that the author wrote although the attribute writes them.
    pub(crate) fn check_body(&self, errors: &mut Errors) {
        for constant in ["SPEC", "ENTRY", "KERNELS"] {
            if let Some((ident, _)) = self.constant(constant) {
                errors.fault(
                    ident.span(),
                    "mla_backend",
                    Fault::new(
                        format!("a `const {constant}` written by hand"),
                        "that of the attribute",
                    )
                    .hint(
                        "remove the constant, or remove the attribute and add the entry to a \
                         registry by hand",
                    ),
                );
            }
        }
    }

    /// Returns the builds in which the body has no spec of its own. If it always has one, this is
    /// `None`; if it never has one, `Some(None)`. If its spec has conditions (`#[cfg(…)]`), this is
    /// the opposite condition, for the builds that do not meet all of them.
    pub(crate) fn misses_spec(&self) -> Option<Option<TokenStream>> {
        match self.constant("SPEC") {
            None => Some(None),
            Some((_, conditions)) if conditions.is_empty() => None,
            Some((_, conditions)) => Some(Some(quote!(#[cfg(not(all(#(#conditions),*)))]))),
        }
    }

    // The constant of this name, and the conditions of its `#[cfg(…)]`.
    fn constant(&self, name: &str) -> Option<(Ident, Vec<TokenStream>)> {
        let tokens: Vec<TokenTree> = self.body.stream().into_iter().collect();
        let (at, ident) = declared(&tokens, "const", name)?;
        let mut before = &tokens[..at];
        let mut conditions = Vec::new();
        while let [rest @ .., TokenTree::Punct(mark), TokenTree::Group(group)] = before
            && mark.as_char() == '#'
        {
            let attribute: Vec<TokenTree> = group.stream().into_iter().collect();
            if let [TokenTree::Ident(cfg), TokenTree::Group(condition)] = attribute.as_slice()
                && cfg == "cfg"
            {
                conditions.push(condition.stream());
            }
            before = rest;
        }
        Some((ident.clone(), conditions))
    }
}

// Returns true if the arguments after a type's name can only mean one type, so that the name is
// unique.
fn has_one_instance(arguments: &PathArguments) -> bool {
    match arguments {
        PathArguments::None => true,
        PathArguments::AngleBracketed(given) => (given.args.iter()).all(
            |it| matches!(it, GenericArgument::Lifetime(lifetime) if lifetime.ident == "static"),
        ),
        PathArguments::Parenthesized(_) => false,
    }
}

// The beginning of an item, up to where its kind is known.
enum Head {
    Impl(Box<ImplBlock>),
    Other { span: Span, what: String },
}

struct ImplBlock {
    attributes: Vec<Attribute>,
    head: TokenStream,
    unsafety: Option<Token![unsafe]>,
    generics: Generics,
    negative: Option<Token![!]>,
    // The trait if the block has one, and otherwise the type.
    first: Type,
    self_type: Option<Type>,
    impl_span: Span,
    body: Group,
}

impl Parse for Head {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attributes = input.call(Attribute::parse_outer)?;
        let tokens: Vec<TokenTree> = input.fork().parse::<TokenStream>()?.into_iter().collect();
        let start = input.fork();
        input.parse::<Visibility>()?;
        let unsafety: Option<Token![unsafe]> = input.parse()?;
        if !input.peek(Token![impl]) {
            let rest: TokenStream = input.parse()?;
            let span = rest
                .into_iter()
                .next()
                .map_or_else(|| start.span(), |it| it.span());
            return Ok(Self::Other {
                span,
                what: item_name(&tokens),
            });
        }
        let impl_span = input.parse::<Token![impl]>()?.span;
        let mut generics = if input.peek(Token![<]) {
            input.parse::<Generics>()?
        } else {
            Generics::default()
        };
        let negative: Option<Token![!]> = input.parse()?;
        let first: Type = input.parse()?;
        let self_type = match input.parse::<Option<Token![for]>>()? {
            Some(_) => Some(input.parse::<Type>()?),
            None => None,
        };
        generics.where_clause = input.parse::<Option<WhereClause>>()?;
        let body = match input.parse::<TokenTree>()? {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => group,
            other => return Err(syn::Error::new(other.span(), "expected the block's `{`")),
        };
        let head = tokens[..tokens.len() - 1].iter().cloned().collect();
        Ok(Self::Impl(Box::new(ImplBlock {
            attributes,
            head,
            unsafety,
            generics,
            negative,
            first,
            self_type,
            impl_span,
            body,
        })))
    }
}

// The kind of an item without `impl`, from its first keyword.
fn item_name(tokens: &[TokenTree]) -> String {
    const KEYWORDS: [&str; 12] = [
        "struct",
        "enum",
        "union",
        "fn",
        "trait",
        "mod",
        "const",
        "static",
        "type",
        "use",
        "extern",
        "macro_rules",
    ];
    let keyword = tokens.iter().find_map(|token| match token {
        TokenTree::Ident(ident) => KEYWORDS.iter().find(|keyword| ident == **keyword),
        _ => None,
    });
    match keyword {
        Some(keyword) => format!("`{keyword}`"),
        None => "another item".to_owned(),
    }
}

/// The parameters of a block.
#[derive(PartialEq)]
enum Parameters {
    None,
    /// Only lifetimes, by their names. Elided lifetimes have no name.
    Lifetimes(Vec<String>),
    Types,
}

impl ImplBlock {
    fn place(self, item: TokenStream, errors: &mut Errors) -> Result<Place, TokenStream> {
        let Some(self_type) = &self.self_type else {
            let given = format!("`impl {}` without a trait", compact(&self.first));
            errors.fault(self.impl_span, "mla_backend", Fault::new(given, BELONGS));
            return Err(item);
        };
        if let Some(negative) = self.negative {
            let fault = Fault::new("a negative `impl`", BELONGS);
            errors.fault(negative.span, "mla_backend", fault);
            return Err(TokenStream::new());
        }
        let (phase, implemented) = self.implemented(self_type, item, errors)?;
        if let Some(unsafety) = self.unsafety {
            let fault = Fault::new("`unsafe impl`", BELONGS)
                .hint("the traits are safe to implement: remove `unsafe`");
            errors.fault(unsafety.span, "mla_backend", fault);
        }
        let parameters = self.check_parameters(self_type, errors);
        let (again, attributes) = (self.attributes.into_iter()).partition::<Vec<_>, _>(|it| {
            it.path()
                .segments
                .last()
                .is_some_and(|it| it.ident == "mla_backend")
        });
        for attribute in again {
            errors.fault(
                attribute.path().span(),
                "mla_backend",
                Fault::new("a second `#[mla_backend]` on one `impl`", "one")
                    .hint("write every key in one of them, and remove the other"),
            );
        }
        let mut place = Place {
            attributes,
            head: self.head,
            phase,
            self_type: self_type.clone(),
            generic: parameters == Parameters::Types,
            body: self.body,
        };
        // Reported faults are corrected, so that the compiler does not report them again.
        if !errors.is_empty() {
            let mut clause = self.generics.where_clause.to_token_stream();
            if let Parameters::Lifetimes(names) = parameters {
                clause = with_static(clause, &names);
                place.give_static(names);
            }
            let self_type = &place.self_type;
            place.head = quote!(impl #implemented for #self_type #clause);
        }
        Ok(place)
    }

    /// Returns the phase and the trait. The trait is the written one, or the one that was probably
    /// meant.
    fn implemented(
        &self,
        self_type: &Type,
        item: TokenStream,
        errors: &mut Errors,
    ) -> Result<(Phase, Type), TokenStream> {
        let given = ungrouped(&self.first);
        if let Some(phase) = phase(given) {
            return Ok((phase, self.first.clone()));
        }
        report_trait(given, self_type, errors);
        let meant = nearest_trait(given).or_else(|| self.trait_of_body());
        meant.ok_or(match names_a_trait(self_type) {
            true => TokenStream::new(),
            false => item,
        })
    }

    /// Reports parameters, because an entry cannot have any. Returns which kind of parameters there
    /// are.
    fn check_parameters(&self, self_type: &Type, errors: &mut Errors) -> Parameters {
        let lifetimes = "an entry is one type that borrows nothing: write `'static`, as in \
                         `impl DecodeBackend for Flash<'static>`";
        let types = "an entry is one concrete type: implement the trait for each, as in \
                     `impl DecodeBackend for Flash<bf16>`";
        let given = &self.generics.params;
        let names = given.iter().map(|it| match it {
            GenericParam::Lifetime(lifetime) => Some(lifetime.lifetime.ident.to_string()),
            _ => None,
        });
        let names: Option<Vec<String>> = names.collect();
        let (span, text, hint, parameters) = match (elided(self_type), names) {
            (_, None) => (given.span(), "generic parameters", types, Parameters::Types),
            (None, Some(names)) if names.is_empty() => return Parameters::None,
            (Some(span), Some(names)) if names.is_empty() => (
                span,
                "an elided lifetime",
                lifetimes,
                Parameters::Lifetimes(names),
            ),
            (_, Some(names)) => {
                let parameters = Parameters::Lifetimes(names);
                (given.span(), "generic parameters", lifetimes, parameters)
            }
        };
        let fault = Fault::new(text, "an `impl` without any").hint(hint);
        errors.fault(span, "mla_backend", fault);
        parameters
    }

    /// The trait that was written under another name, recognised by a function in the body.
    fn trait_of_body(&self) -> Option<(Phase, Type)> {
        let tokens: Vec<TokenTree> = self.body.stream().into_iter().collect();
        let has = |name: &str| declared(&tokens, "fn", name).is_some();
        match (has("prefill"), has("decode")) {
            (true, false) => Some((Phase::Prefill, self.first.clone())),
            (false, true) => Some((Phase::Decode, self.first.clone())),
            _ => None,
        }
    }
}

/// The place of a keyword before a name, and the name.
fn declared<'a>(tokens: &'a [TokenTree], keyword: &str, name: &str) -> Option<(usize, &'a Ident)> {
    let mut pairs = tokens.windows(2).enumerate();
    pairs.find_map(|(at, pair)| match pair {
        [TokenTree::Ident(first), TokenTree::Ident(ident)] if first == keyword && ident == name => {
            Some((at, ident))
        }
        _ => None,
    })
}

fn ungrouped(mut ty: &Type) -> &Type {
    while let Type::Group(group) = ty {
        ty = &group.elem;
    }
    ty
}

fn phase(implemented: &Type) -> Option<Phase> {
    let name = trait_name(implemented)?;
    PHASES.into_iter().find(|phase| name == phase.backend())
}

fn names_a_trait(ty: &Type) -> bool {
    phase(ungrouped(ty)).is_some()
}

// The trait whose name is almost the written one.
fn nearest_trait(implemented: &Type) -> Option<(Phase, Type)> {
    let name = trait_name(implemented)?;
    let meant = nearest(&name.to_string(), PHASES.map(Phase::backend))?;
    let Type::Path(mut path) = implemented.clone() else {
        return None;
    };
    path.path.segments.last_mut()?.ident = Ident::new(meant, name.span());
    let mended = Type::Path(path);
    Some((phase(&mended)?, mended))
}

fn report_trait(implemented: &Type, self_type: &Type, errors: &mut Errors) {
    let name = trait_name(implemented);
    let span = name.as_ref().map_or_else(Span::call_site, Ident::span);
    let given = format!("`impl {} for …`", compact(implemented));
    let fault = Fault::new(given, BELONGS);
    let fault = match nearest_trait(implemented) {
        Some((phase, _)) => fault.meant(Some(phase.backend())),
        None if names_a_trait(self_type) => fault.hint(format!(
            "the trait stands first: write `impl {} for {}`",
            compact(self_type),
            compact(implemented)
        )),
        None => fault.hint("a trait is known by its own name, not by one from `use … as …`"),
    };
    errors.fault(span, "mla_backend", fault);
}

fn trait_name(ty: &Type) -> Option<Ident> {
    match ty {
        Type::Path(path) => Some(path.path.segments.last()?.ident.clone()),
        _ => None,
    }
}

// The first elided lifetime: `'_`, or `&` without a lifetime.
fn elided(ty: &Type) -> Option<Span> {
    let tokens: Vec<TokenTree> = ty.to_token_stream().into_iter().collect();
    (0..tokens.len()).find_map(|at| {
        let TokenTree::Punct(mark) = &tokens[at] else {
            return None;
        };
        match (mark.as_char(), tokens.get(at + 1)) {
            ('\'', Some(TokenTree::Ident(name))) => (name == "_").then(|| name.span()),
            ('&', next) => (!is_tick(next)).then(|| mark.span()),
            _ => None,
        }
    })
}

fn is_tick(token: Option<&TokenTree>) -> bool {
    matches!(token, Some(TokenTree::Punct(mark)) if mark.as_char() == '\'')
}

// Replaces these lifetimes by `'static`. If `_` is among them, also adds `'static` after each `&`
// without a lifetime.
fn with_static(tokens: TokenStream, lifetimes: &[String]) -> TokenStream {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is_given = |name: &Ident| lifetimes.iter().any(|it| name == it);
    let is_elided = lifetimes.iter().any(|it| it == "_");
    let mended = tokens.iter().enumerate().map(|(at, token)| match token {
        TokenTree::Ident(name) if is_tick(tokens[..at].last()) && is_given(name) => {
            Ident::new("static", name.span()).into_token_stream()
        }
        TokenTree::Punct(mark) if mark.as_char() == '&' && !is_tick(tokens.get(at + 1)) => {
            match is_elided {
                true => quote!(&'static),
                false => token.to_token_stream(),
            }
        }
        TokenTree::Group(group) => {
            let mut mended = Group::new(group.delimiter(), with_static(group.stream(), lifetimes));
            mended.set_span(group.span());
            mended.into_token_stream()
        }
        token => token.to_token_stream(),
    });
    mended.collect()
}

/// Writes tokens with the spaces that an author would use.
pub(crate) fn compact(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    for (spaced, close) in [
        ("& ", "&"),
        (" ::", "::"),
        (":: ", "::"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        ("! (", "!("),
    ] {
        text = text.replace(spaced, close);
    }
    text
}
