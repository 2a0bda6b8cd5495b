//! Compiles FlashInfer's kernels from its pinned wheel. Without a family, the wheel is not needed.

#[cfg(feature = "gpu")]
fn main() -> Result<(), mla_build::Error> {
    let wheel = mla_build::Wheel::new("flashinfer-python", "0.7.2.post1")
        // FlashInfer needs a newer CCCL than CUDA 13.0 has, so the wheel's own comes first.
        .include("flashinfer/data/cccl/libcudacxx/include")
        .include("flashinfer/data/cccl/thrust")
        .include("flashinfer/data/cccl/cub")
        .system("flashinfer/data/include")
        .system("flashinfer/data/cutlass/include")
        .system("flashinfer/data/cutlass/tools/util/include")
        .contents("381943c19c51d633a07f9805a29cf1b1a3057a627c993eb2e0f8aa2dfd7c5755");
    mla_build::Kernels::new()
        .sources("kernels/**/*.cu")
        .header("kernels/flashinfer.h")
        .include("kernels/common")
        .include("kernels/stand-in")
        .wheel(wheel)
        // FlashInfer's own builds have these flags. Without NDEBUG it prints errors on standard
        // error.
        .define("NDEBUG")
        .flag("--expt-relaxed-constexpr")
        .flag("--use_fast_math")
        .memory_for("kernels/sm90/*.cu", 4 << 30)
        .memory_for("kernels/sm100/*.cu", 5 << 30)
        .compile("flashinfer")
        .map(drop)
}

#[cfg(not(feature = "gpu"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
