fn main() -> Result<(), mla_build::Error> {
    mla_build::Kernels::new().sources("kernels/**/*.cu").header("kernels/naive.h").compile("naive").map(drop)
}
