//! Says what a build of the kernels would compile, and compiles nothing: a test calls none of them.

fn main() -> Result<(), mla_build::Error> {
    println!("cargo::rerun-if-changed=kernels");
    mla_build::Kernels::new()
        .sources("kernels/**/*.cu")
        .constants("kernels")
        .map(drop)
}
