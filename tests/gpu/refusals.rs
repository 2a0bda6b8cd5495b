//! Raw calls that are refused.

use mla_kernels::raw;

/// The field of a raw call's parameters that is given something bad, and how.
pub(crate) type Spoilt<P> = (&'static str, fn(&mut P));

/// A call that is good but for one field is refused, by that field's name.
pub(crate) fn each_is_refused<P: Copy>(
    good: &P,
    spoilt: &[Spoilt<P>],
    call: impl Fn(&P) -> raw::MlaStatus,
) {
    for (field, spoil) in spoilt {
        let mut params = *good;
        spoil(&mut params);
        let refused = raw::check("a spoilt call", call(&params));
        let refused = refused.expect_err(field).to_string();
        assert!(
            refused.starts_with(&format!("{field}: given ")) && refused.contains("accepted "),
            "{field}: {refused}"
        );
    }
}
