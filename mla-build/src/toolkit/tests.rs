use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
};

use super::*;

fn write(path: PathBuf, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn program(path: PathBuf, script: &str) {
    write(path.clone(), &format!("#!/bin/sh\n{script}\n"));
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Makes a folder in the shape of a toolkit. Its nvcc only prints a version.
fn fake(root: &Path, version: &str) {
    write(root.join("include/cuda_runtime.h"), "");
    write(root.join("lib/libcudart_static.a"), "");
    program(
        root.join("bin/nvcc"),
        &format!("echo 'Cuda compilation tools, release {version}, V{version}.1'"),
    );
}

/// Returns the message of a search for a part that must fail.
fn refused<T>(found: Result<T, Error>) -> String {
    let Err(error) = found else {
        panic!("nothing is to be found")
    };
    error.to_string()
}

#[test]
fn the_first_place_of_the_order_that_is_whole_wins() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, version) in [
        ("explicit", "13.6"),
        ("home", "13.5"),
        ("path", "13.4"),
        ("usual", "13.3"),
        ("venv/lib/python3.12/site-packages/nvidia/cu13", "13.2"),
        ("site/nvidia/cu13", "13.1"),
        ("own/nvidia/cu13", "13.0"),
    ] {
        fake(&at(name), version);
    }
    program(at("python3"), &format!("echo {}", at("site").display()));
    let variables = [
        ("MLA_CUDA_HOME", at("explicit")),
        ("CUDA_HOME", at("home")),
        ("PATH", at("path/bin")),
        ("VIRTUAL_ENV", at("venv")),
    ];
    // Each search lacks the places that the searches before it found.
    for (first, (place, minor)) in [
        ("MLA_CUDA_HOME", 6),
        ("CUDA_HOME", 5),
        ("PATH", 4),
        ("usual folder", 3),
        ("VIRTUAL_ENV", 2),
        ("Python site-packages", 1),
        ("toolkit folder", 0),
    ]
    .into_iter()
    .enumerate()
    {
        let left = match first {
            0..=3 => &variables[first..],
            4 => &variables[3..],
            _ => &[],
        };
        let search = Search {
            usual: (first < 4).then(|| at("usual")).into_iter().collect(),
            python: (first < 6).then(|| at("python3")),
            own: Some(at("own")),
            ..Search::for_test(left)
        };
        let cuda = cuda(&search, "install").unwrap();
        assert_eq!((&*cuda.found.place, cuda.version.minor), (place, minor));
    }
}

#[test]
fn a_toolkit_without_its_headers_is_passed_over_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let half = folder.path().join("half");
    fake(&half, "12.8");
    fs::remove_file(half.join("include/cuda_runtime.h")).unwrap();
    let search = Search {
        own: Some(folder.path().join("own")),
        ..Search::for_test(&[("CUDA_HOME", &half)])
    };
    let message = refused(cuda(&search, "cargo xtask toolkit"));
    for expected in [
        &*format!(
            "CUDA_HOME: {} lacks cuda_runtime.h in include, targets/",
            half.display()
        ),
        "CUDA_PATH: not set",
        "PATH: no nvcc",
        "toolkit folder:",
        "cargo xtask toolkit",
    ] {
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn an_explicit_place_that_is_wrong_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fake(&at("good"), "13.0");
    fake(&at("other"), "12.8");
    let nvcc = at("good/bin/nvcc");
    let with_flags = format!("{} --threads 2", nvcc.display());
    let alone = format!(
        "the path alone, {}; flags go into NVCC_APPEND",
        nvcc.display()
    );
    for (variable, value, accepted) in [
        ("NVCC", at("wrong/bin/nvcc"), "bin/nvcc"),
        ("NVCC", "nvcc".into(), "the absolute path of bin/nvcc"),
        ("NVCC", with_flags.into(), &*alone),
        ("MLA_CUDA_HOME", at("wrong"), "a place that holds bin/nvcc"),
        ("MLA_CUDA_HOME", "~/cuda".into(), "an absolute path"),
        ("MLA_CUDA_HOME", at("other"), "the toolkit of NVCC"),
        ("MLA_CUTLASS", at("good"), "a place that holds"),
        ("MLA_CUTLASS", "~/cuda".into(), "an absolute path"),
        ("LIBCLANG_PATH", at("good"), "a place that holds"),
        ("LIBCLANG_PATH", "~/cuda".into(), "an absolute path"),
    ] {
        let mut variables = vec![("CUDA_HOME", at("good")), (variable, value.clone())];
        if accepted == "the toolkit of NVCC" {
            variables.push(("NVCC", nvcc.clone()));
        }
        let search = Search::for_test(&variables);
        let message = match variable {
            "MLA_CUTLASS" => refused(cutlass(&search, "")),
            "LIBCLANG_PATH" => refused(libclang(&search, "")),
            _ => refused(cuda(&search, "")),
        };
        assert!(
            message.starts_with(&format!("{variable}: given {value:?}, accepted "))
                && message.contains(accepted),
            "{message}"
        );
    }
    let same = [("NVCC", &nvcc), ("MLA_CUDA_HOME", &at("good"))];
    cuda(&Search::for_test(&same), "").unwrap();
}

#[test]
fn a_variable_that_is_passed_over_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fake(&at("usual"), "13.0");
    fake(&at("home"), "12.8");
    fs::create_dir(at("empty")).unwrap();
    let search = |variable, value: &Path| Search {
        usual: vec![at("usual")],
        ..Search::for_test(&[(variable, value)])
    };
    for (variable, value, says) in [
        ("CUDA_HOME", PathBuf::from("/nonexistent"), "lacks bin/nvcc"),
        ("CUDA_HOME", at("home/bin"), "/home is one; "),
        ("CUDA_PATH", at("empty"), "lacks bin/nvcc"),
        ("CUDA_HOME", "~/cuda".into(), "an absolute path"),
        ("CUDA_PATH", "nope/cuda".into(), "an absolute path"),
    ] {
        let search = search(variable, &value);
        let cuda = cuda(&search, "").unwrap();
        assert_eq!(cuda.found.path, at("usual"));
        let warnings = search.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let start = format!("{variable}: given {value:?}, accepted ");
        let end = format!("CUDA of {} (usual folder) compiles", at("usual").display());
        assert!(
            warnings[0].starts_with(&start)
                && warnings[0].contains(says)
                && warnings[0].ends_with(&end),
            "{warnings:?}"
        );
        // A relative path is not a place where a toolkit may appear.
        let absent = earlier(&search, &cuda).absent;
        assert!(absent.iter().all(|it| it.is_absolute()), "{absent:?}");
    }
    let whole = search("CUDA_HOME", &at("home"));
    cuda(&whole, "").unwrap();
    assert_eq!(whole.warnings(), [""; 0]);
}

#[test]
fn a_toolkit_of_another_machine_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fake(root, "13.0");
    for (own, other) in [
        ("x86_64", "sbsa-linux"),
        ("x86_64", "aarch64-linux"),
        ("aarch64", "x86_64-linux"),
    ] {
        for name in ["include", "lib", "targets"] {
            let _ = fs::remove_dir_all(root.join(name));
            let _ = fs::remove_file(root.join(name));
        }
        let fill = |target: &str| {
            let target = root.join("targets").join(target);
            write(target.join("include/cuda_runtime.h"), "");
            write(target.join("lib/libcudart_static.a"), "");
        };
        fill(other);
        let machine = Machine::of(own);
        let lacks = layout_for(&machine, root).unwrap_err();
        let folders = format!(
            "cuda_runtime.h in include, targets/{}/include",
            machine.targets[0]
        );
        assert!(
            lacks.starts_with(&folders)
                && lacks.contains(&format!("targets/{other} is for another")),
            "{lacks}"
        );
        // The usual names are links to that folder.
        for name in ["include", "lib"] {
            symlink(format!("targets/{other}/{name}"), root.join(name)).unwrap();
        }
        layout_for(&machine, root).unwrap_err();
        fill(machine.targets.last().unwrap());
        let (_, _, library) = layout_for(&machine, root).unwrap();
        assert!(library.starts_with(root.join("targets")), "{library:?}");
    }
}

#[test]
fn cutlass_and_libclang_are_found_in_a_wheel_with_their_versions() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let include = at("cutlass_library/source/include/cutlass");
    write(include.join("cutlass.h"), "");
    write(
        include.join("version.h"),
        "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n",
    );
    write(at("clang/native/libclang.so"), "");
    fs::create_dir(at("libclang-18.1.1.dist-info")).unwrap();
    let search = Search {
        own: Some(at("")),
        ..Search::default()
    };
    let cutlass = cutlass(&search, "").unwrap();
    assert_eq!(cutlass.version.as_deref(), Some("4.2.0"));
    let libclang = libclang(&search, "").unwrap();
    assert_eq!(libclang.version.as_deref(), Some("18.1.1"));
    assert!(libclang.path.ends_with("clang/native/libclang.so"));
}

#[test]
fn releases_sort_by_number() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["cuda-9.2", "cuda-12.8", "cuda-13.0", "cuda-12.10"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    let names: Vec<_> = search::children(folder.path(), "cuda-")
        .iter()
        .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["cuda-9.2", "cuda-12.8", "cuda-12.10", "cuda-13.0"]);
}

#[test]
fn the_other_library_of_that_name_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libclang-cpp.so.14", "libclang-cpp.so.20"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    assert_eq!(search::libclang_in_folder(folder.path()), None);
    for (name, best) in [
        ("libclang-9.so", "libclang-9.so"),
        ("libclang-18.so.1", "libclang-18.so.1"),
        ("libclang.so", "libclang.so"),
    ] {
        fs::write(folder.path().join(name), "").unwrap();
        assert_eq!(
            search::libclang_in_folder(folder.path()),
            Some(folder.path().join(best))
        );
    }
}

#[test]
fn every_wheel_is_pinned_to_a_version_and_to_hashes() {
    let pins = Pins::current();
    let names = pins.packages.join("\n");
    let hash = &blake3::hash(names.as_bytes()).to_hex()[..8];
    assert_eq!(
        pins.name,
        format!("cuda-13.0-{hash}"),
        "the folder's name in toolkit.txt"
    );
    assert!(names.contains("nvidia-cuda-nvcc=="));
    assert_eq!(pins.packages.len(), pins.hashes.len());
    for (package, hashes) in pins.packages.iter().zip(&pins.hashes) {
        let (name, version) = package.split_once("==").expect(package);
        assert!(
            !name.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()),
            "{package}"
        );
        let is_hash =
            |hash: &String| hash.len() == 64 && hash.chars().all(|c| c.is_ascii_hexdigit());
        assert!(
            !hashes.is_empty() && hashes.iter().all(is_hash),
            "{package}"
        );
    }
    let command = pins.command();
    assert!(
        command.contains("--require-hashes") && command.ends_with("/toolkit.txt'"),
        "{command}"
    );
}
