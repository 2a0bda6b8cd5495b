//! Compiles the shim over cuDNN's frontend from its pinned wheels. Without the feature, the wheels
//! are not needed.

#[cfg(feature = "cudnn")]
fn main() -> Result<(), mla_build::Error> {
    use mla_build::Wheel;

    mla_build::Kernels::new()
        .sources("shim/*.cc")
        .header("shim/cudnn_shim.h")
        .wheel(
            Wheel::new("nvidia-cudnn-frontend", "1.32.0")
                .system("include")
                .contents("09085a7a821640a84eb5152ddaa9dd013978313e9b0df835ca54333718aef86b"),
        )
        .wheel(
            Wheel::new("nvidia-cudnn-jit-cu13", "9.27.0.42")
                .system("nvidia/cudnn_jit/include")
                .contents("3c60d5077bbfaa68fd7db83742174e9639bcfde76efeb862c5193e6fab7a3758"),
        )
        .include("shim")
        // cuDNN and the CUDA runtime are opened when the program runs.
        .define("NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING")
        .compile("cudnn_shim")?;
    // The shim calls dlopen, which the C library has since glibc 2.34.
    println!("cargo::rustc-link-lib=dylib=dl");
    Ok(())
}

#[cfg(not(feature = "cudnn"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
