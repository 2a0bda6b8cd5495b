//! Refusals of raw calls.

use mla_kernels::raw;

/// The field of a raw call's parameters that gets a bad value, and the function that sets it.
pub(crate) type WrongField<P> = (&'static str, fn(&mut P));

/// Checks that a call that is valid except for one field is refused with that field's name.
pub(crate) fn each_is_refused<P: Copy>(
    good: &P,
    wrong: &[WrongField<P>],
    call: impl Fn(&P) -> raw::MlaStatus,
) {
    for (field, set_wrong) in wrong {
        let mut params = *good;
        set_wrong(&mut params);
        // SAFETY: the status was returned by a function of `raw`.
        let refused = unsafe { raw::check("a wrong call", call(&params)) };
        let refused = refused.expect_err(field).to_string();
        assert!(
            refused.starts_with(&format!("{field}: given ")) && refused.contains("accepted "),
            "{field}: {refused}"
        );
    }
}
