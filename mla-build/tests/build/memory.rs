//! The number of compilers that run at once if memory is short.

use std::fs;

use crate::stub::{Says, World};
use mla_build::report::Outcome;

/// Runs `script` before the compiler. `$top` is the toolkit's folder, and `stub` runs the compiler.
fn wrap(world: &World, script: &str) {
    let stub = world.read("toolkit/bin/nvcc");
    world.program("toolkit/bin/stub", &stub);
    world.program(
        "toolkit/bin/nvcc",
        &format!(
            "#!/bin/sh\ntop=$(dirname \"$0\")/..\nstub() {{ \"$top/bin/stub\" \"$@\"; }}\n\
             [ \"$1\" = --version ] && {{ stub --version; exit; }}\n{script}\n"
        ),
    );
}

/// Records in the file `overlaps` each compiler that runs at the same time as another.
fn note_overlaps(world: &World) {
    wrap(
        world,
        "mkdir \"$top/busy\" 2>/dev/null || echo \"$*\" >>\"$top/overlaps\"\n\
         sleep 0.3\nstub \"$@\"\nstatus=$?\nrmdir \"$top/busy\" 2>/dev/null\nexit $status",
    );
}

fn overlapped(world: &World) -> bool {
    let path = world.at("toolkit/overlaps");
    let overlapped = path.exists();
    let _ = fs::remove_file(path);
    overlapped
}

#[test]
fn declared_unit_memory() {
    let world = World::new();
    note_overlaps(&world);
    world.build().unwrap();
    assert!(overlapped(&world), "two jobs and little memory");

    let world = World::new();
    note_overlaps(&world);
    let huge = || world.kernels().memory_for("cuda/**", 1 << 50);
    huge().compile("kernels").unwrap();
    assert!(!overlapped(&world), "each needs more than there is");
    // The memory that they needed is known by now, also for other flags and other targets.
    huge()
        .define("OTHER")
        .enable("sm100")
        .compile("kernels")
        .unwrap();
    assert!(overlapped(&world));
}

#[test]
fn out_of_memory_retries_alone() {
    let world = World::new();
    wrap(
        &world,
        "case \"$*\" in *a.cu)\n  echo tried >>\"$top/tried\"\n  \
         [ $(wc -l <\"$top/tried\") -gt 1 ] || { echo 'nvcc error   : cicc died due to signal 9 \
         (Killed)'; exit 1; }\n  ;;\nesac\nstub \"$@\"",
    );
    let built = world.build().unwrap();
    assert_eq!(built.report.units.len(), 3);
    assert_eq!(world.read("toolkit/tried"), "tried\ntried\n");
    world.library("out").says("body-a");
    let again = world.build().unwrap().report;
    assert_eq!(again.count(Outcome::Cached), 3);
}

#[test]
fn out_of_memory_alone() {
    let world = World::new();
    wrap(
        &world,
        "case \"$*\" in *a.cu) echo tried >>\"$top/tried\"; echo 'cc1plus: out of memory'; exit \
         1;; esac\n\
         stub \"$@\"",
    );
    let message = world.build().unwrap_err().to_string();
    message.says("ran out of memory");
    message.says("1 of 3 units failed");
    assert_eq!(world.read("toolkit/tried"), "tried\ntried\n");
}
