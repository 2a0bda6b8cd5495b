//! Raw calls that are refused.

use mla_kernels::raw;

/// The field of a raw call's parameters that gets a bad value, and the function that sets it.
pub(crate) type WrongField<P> = (&'static str, fn(&mut P));

/// Makes a prefill of two requests with two heads each, whose rows lie one behind the other; the
/// addresses and the workspace are the caller's to fill in.
pub(crate) fn prefill_without_addresses() -> raw::MlaPrefillParams {
    let mut params = raw::MlaPrefillParams {
        query_token_stride: 2 * 192,
        query_head_stride: 192,
        key_nope_token_stride: 2 * 128,
        key_nope_head_stride: 128,
        key_rope_token_stride: 64,
        value_token_stride: 2 * 128,
        value_head_stride: 128,
        out_token_stride: 2 * 128,
        out_head_stride: 128,
        lse_head_stride: 130,
        ..Default::default()
    };
    (params.query_tokens, params.key_tokens) = (130, 130);
    (params.requests, params.heads) = (2, 2);
    (params.max_query_len, params.max_key_len) = (100, 100);
    (params.nope_dim, params.rope_dim, params.value_dim) = (128, 64, 128);
    params.dtype = raw::MLA_DTYPE_BF16 as i32;
    (params.causal, params.softmax_scale) = (1, 0.1);
    params
}

/// Checks that a call which is good but for one field is refused, by that field's name.
pub(crate) fn each_is_refused<P: Copy>(
    good: &P,
    wrong: &[WrongField<P>],
    call: impl Fn(&P) -> raw::MlaStatus,
) {
    for (field, set_wrong) in wrong {
        let mut params = *good;
        set_wrong(&mut params);
        // SAFETY: the status is that of a function of `raw`.
        let refused = unsafe { raw::check("a wrong call", call(&params)) };
        let refused = refused.expect_err(field).to_string();
        assert!(
            refused.starts_with(&format!("{field}: given ")) && refused.contains("accepted "),
            "{field}: {refused}"
        );
    }
}
