//! The `impl` block that the attribute stands on.

use heck::ToShoutySnakeCase;
use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::{Parse, ParseStream, Parser};
use syn::spanned::Spanned;
use syn::{
    Attribute, Generics, Path, PathArguments, PathSegment, Token, Type, Visibility, WhereClause,
};

use crate::errors::{Errors, Fault, nearest};

/// Which of the two traits is implemented.
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

/// `impl Trait for Type { … }`, of which the body stays as it was written.
pub(crate) struct Place {
    pub(crate) attributes: Vec<Attribute>,
    /// From `impl` to before the braces.
    pub(crate) head: TokenStream,
    pub(crate) phase: Phase,
    pub(crate) self_type: Type,
    /// Whether it has parameters, which is an error of its own.
    pub(crate) generic: bool,
    pub(crate) body: Group,
}

/// Where the attribute belongs, as error messages say it.
const BELONGS: &str = "`impl PrefillBackend for T` or `impl DecodeBackend for T`";

impl Place {
    /// Reads the item, or reports why the attribute cannot stand there.
    pub(crate) fn parse(item: TokenStream, errors: &mut Errors) -> Option<Self> {
        let head = match Head::parse.parse2(item) {
            Ok(head) => head,
            Err(error) => {
                errors.message(error.span(), format!("mla_backend: {error}"));
                return None;
            }
        };
        match head {
            Head::Impl(block) => block.place(errors),
            Head::Other { span, what } => {
                errors.fault(span, "mla_backend", Fault::new(what, BELONGS));
                None
            }
        }
    }

    /// The type's name in upper snake case, or `None` where the type has no name of its own: it is
    /// no path, or one of several instances of a generic type.
    pub(crate) fn default_name(&self) -> Option<String> {
        let mut ty = &self.self_type;
        while let Type::Group(group) = ty {
            ty = &group.elem;
        }
        let Type::Path(path) = ty else { return None };
        let last = path.path.segments.last()?;
        let named = path.qself.is_none() && matches!(last.arguments, PathArguments::None);
        let name = last.ident.to_string();
        named.then(|| name.trim_start_matches("r#").to_shouty_snake_case())
    }

    /// Reports the constants that the attribute writes, where they are written by hand as well.
    pub(crate) fn check_body(&self, errors: &mut Errors) {
        for constant in ["SPEC", "ENTRY", "KERNELS"] {
            if let Some(ident) = self.constant(constant) {
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

    /// Whether the body already has the constant that the attribute writes.
    pub(crate) fn has_spec(&self) -> bool {
        self.constant("SPEC").is_some()
    }

    fn constant(&self, name: &str) -> Option<Ident> {
        let tokens: Vec<TokenTree> = self.body.stream().into_iter().collect();
        tokens.windows(2).find_map(|pair| match pair {
            [TokenTree::Ident(keyword), TokenTree::Ident(ident)]
                if keyword == "const" && ident == name =>
            {
                Some(ident.clone())
            }
            _ => None,
        })
    }
}

// An item up to where it is known what it is.
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
    // The trait where there is one, else the type.
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

// What an item without `impl` is, by its first keyword.
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

impl ImplBlock {
    fn place(self, errors: &mut Errors) -> Option<Place> {
        let Some(self_type) = self.self_type else {
            let given = format!("`impl {}` without a trait", compact(&self.first));
            errors.fault(self.impl_span, "mla_backend", Fault::new(given, BELONGS));
            return None;
        };
        if let Some(unsafety) = self.unsafety {
            errors.fault(
                unsafety.span,
                "mla_backend",
                Fault::new("`unsafe impl`", BELONGS)
                    .hint("the traits are safe to implement: remove `unsafe`"),
            );
        }
        if let Some(negative) = self.negative {
            errors.fault(
                negative.span,
                "mla_backend",
                Fault::new("a negative `impl`", BELONGS),
            );
            return None;
        }
        let generic = !self.generics.params.is_empty();
        if generic {
            errors.fault(
                self.generics.params.span(),
                "mla_backend",
                Fault::new("generic parameters", "an `impl` without any").hint(
                    "an entry is one concrete type: implement the trait for each, as in \
                     `impl DecodeBackend for Flash<bf16>`",
                ),
            );
        }
        let phase = phase(&self.first, errors)?;
        let (again, attributes) = (self.attributes.into_iter())
            .partition::<Vec<_>, _>(|it| it.path().segments.last().is_some_and(is_this_attribute));
        for attribute in again {
            errors.fault(
                attribute.path().span(),
                "mla_backend",
                Fault::new("a second `#[mla_backend]` on one `impl`", "one")
                    .hint("write every key in one of them, and remove the other"),
            );
        }
        Some(Place {
            attributes,
            head: self.head,
            phase,
            self_type,
            generic,
            body: self.body,
        })
    }
}

fn phase(implemented: &Type, errors: &mut Errors) -> Option<Phase> {
    let mut ty = implemented;
    while let Type::Group(group) = ty {
        ty = &group.elem;
    }
    let name = match ty {
        Type::Path(path) => last(&path.path),
        _ => None,
    };
    let phases = [Phase::Prefill, Phase::Decode];
    if let Some(phase) = phases
        .into_iter()
        .find(|phase| name.as_ref().is_some_and(|name| name == phase.backend()))
    {
        return Some(phase);
    }
    let span = name.as_ref().map_or_else(Span::call_site, Ident::span);
    let given = format!("`impl {} for …`", compact(ty));
    let meant = name.and_then(|name| nearest(&name.to_string(), phases.map(Phase::backend)));
    errors.fault(span, "mla_backend", Fault::new(given, BELONGS).meant(meant));
    None
}

fn is_this_attribute(segment: &PathSegment) -> bool {
    segment.ident == "mla_backend"
}

fn last(path: &Path) -> Option<Ident> {
    path.segments.last().map(|segment| segment.ident.clone())
}

/// Tokens as an author would space them.
pub(crate) fn compact(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    for (spaced, close) in [
        ("& ", "&"),
        (" ::", "::"),
        (":: ", "::"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
    ] {
        text = text.replace(spaced, close);
    }
    text
}
