//! Compiles FlashMLA's dense decode from a checkout that the user names. Without the feature, the
//! checkout is not needed.

#[cfg(feature = "sm90")]
fn main() -> Result<(), mla_build::Error> {
    let flashmla = mla_build::Checkout::new("FlashMLA", "9241ae3ef9bac614dd25e45e507e089f888280e0")
        .repository("https://github.com/deepseek-ai/FlashMLA")
        .include("csrc")
        .include("csrc/kerutils/include")
        // The toolkit's CUTLASS is used instead.
        .without("csrc/cutlass")
        .contents("7845f1d0fdbdd7d3f4ac66c06981be5af574d30a95a5c61fba5f08bc6dc80e99");
    mla_build::Kernels::new()
        .sources("kernels/**/*.cu")
        .header("kernels/flashmla.h")
        .include("kernels")
        // This folder is searched before FlashMLA's own. FlashMLA's macros end the process, and
        // these throw.
        .include("kernels/overlay")
        .checkout(flashmla)
        .cutlass()
        .define("NDEBUG")
        .flag("-std=c++20")
        .flag("--expt-relaxed-constexpr")
        .flag("--expt-extended-lambda")
        .flag("--use_fast_math")
        .memory_for("kernels/sm90/*.cu", 3 << 30)
        .compile("flashmla")
        .map(drop)
}

#[cfg(not(feature = "sm90"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
