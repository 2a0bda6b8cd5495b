//! Setters of structs that may get new fields: a constructor fills such a struct, and a `with_…`
//! method for each field.

/// Writes the methods. Each takes the struct by value, so that calls can be chained, in constants
/// too.
macro_rules! setters {
    ($($method:ident($field:ident: $type:ty);)*) => {
        $(
            #[doc = concat!(
                "The same with this [`", stringify!($field), "`](Self::", stringify!($field), ")."
            )]
            #[must_use]
            pub const fn $method(mut self, $field: $type) -> Self {
                self.$field = $field;
                self
            }
        )*
    };
}

/// Writes the methods of fields that may be absent. Each takes the value, or an option of it.
macro_rules! options {
    ($($method:ident($field:ident: $type:ty);)*) => {
        $(
            #[doc = concat!(
                "The same with this [`", stringify!($field), "`](Self::", stringify!($field), ")."
            )]
            #[must_use]
            pub fn $method(mut self, $field: impl Into<Option<$type>>) -> Self {
                self.$field = $field.into();
                self
            }
        )*
    };
}

pub(crate) use {options, setters};
