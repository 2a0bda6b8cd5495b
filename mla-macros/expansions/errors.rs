impl DecodeBackend for Flash {
    type Device = Cuda;
    const SPEC: ::mla_runtime::spec::BackendSpec = ::mla_runtime::spec::BackendSpec::new(
        "",
        ::mla_runtime::spec::Phase::Decode,
        <<Self as ::mla_runtime::backend::DecodeBackend>::Device as ::mla_runtime::device::Device>::PLATFORM,
    );
}
::core::compile_error! {
    "dtypes: given `bf61`, accepted a list of f32, f16, bf16; did you mean `bf16`?"
}
::core::compile_error! {
    "sm: given `9o` (element 2 of `90|9o`), accepted `any`, `compiled`, or a list of capabilities: exact (`90`), a family (`10x`), a floor (`80+`); did you mean `90`?"
}
