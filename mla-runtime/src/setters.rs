//! Setters of structs that may get new fields. Such a struct has a constructor, and a method
//! `with_…` for each field. Also copies of views.

/// Writes the setters. Each takes the struct by value, so calls can be chained. They also work in
/// constants.
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

/// Writes the setters of optional fields. Each takes the value or an `Option` of it.
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

/// Makes views copies of themselves. A derived implementation would ask the same of the device.
macro_rules! copies {
    ([$($bounds:tt)*] $type:ty) => {
        impl<$($bounds)*> Clone for $type {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<$($bounds)*> Copy for $type {}
    };
}

pub(crate) use {copies, options, setters};
