use std::{fs, os::unix::fs::PermissionsExt};

use super::*;

/// Makes a folder in the shape of a toolkit. Its nvcc only prints a version.
fn fake(root: &Path, version: &str) {
    for folder in ["bin", "include", "lib"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::write(root.join("include/cuda_runtime.h"), "").unwrap();
    fs::write(root.join("lib/libcudart_static.a"), "").unwrap();
    let nvcc = root.join("bin/nvcc");
    fs::write(
        &nvcc,
        format!("#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n"),
    )
    .unwrap();
    fs::set_permissions(nvcc, fs::Permissions::from_mode(0o755)).unwrap();
}

fn python(path: &Path, folders: &[&Path]) {
    let lines: Vec<_> = folders
        .iter()
        .map(|f| format!("echo {}", f.display()))
        .collect();
    fs::write(path, format!("#!/bin/sh\n{}\n", lines.join("\n"))).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
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
    let interpreter = at("python3");
    python(&interpreter, &[&at("site")]);

    let (explicit, home, on_path, venv) = (at("explicit"), at("home"), at("path/bin"), at("venv"));
    let mut variables: Vec<(&str, &std::ffi::OsStr)> = vec![
        ("MLA_CUDA_HOME", explicit.as_os_str()),
        ("CUDA_HOME", home.as_os_str()),
        ("PATH", on_path.as_os_str()),
    ];
    let usual = at("usual");
    let own = at("own");
    let look = |variables: &[(&str, &std::ffi::OsStr)], usual: &[&Path], python: Option<&Path>| {
        let cuda = cuda(
            &Search::for_test(variables, usual, python, Some(&own)),
            "install",
        )
        .unwrap();
        (cuda.found.place, cuda.version.minor)
    };
    let all: &[&Path] = &[&usual];
    assert_eq!(
        look(&variables, all, Some(&interpreter)),
        ("MLA_CUDA_HOME".into(), 6)
    );
    variables.remove(0);
    assert_eq!(
        look(&variables, all, Some(&interpreter)),
        ("CUDA_HOME".into(), 5)
    );
    variables.remove(0);
    assert_eq!(
        look(&variables, all, Some(&interpreter)),
        ("PATH".into(), 4)
    );
    variables.remove(0);
    variables.push(("VIRTUAL_ENV", venv.as_os_str()));
    assert_eq!(
        look(&variables, all, Some(&interpreter)),
        ("usual folder".into(), 3)
    );
    assert_eq!(
        look(&variables, &[], Some(&interpreter)),
        ("VIRTUAL_ENV".into(), 2)
    );
    variables.clear();
    assert_eq!(
        look(&variables, &[], Some(&interpreter)),
        ("Python site-packages".into(), 1)
    );
    assert_eq!(look(&variables, &[], None), ("toolkit folder".into(), 0));
}

#[test]
fn a_toolkit_without_its_headers_is_passed_over_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (half, own) = (folder.path().join("half"), folder.path().join("own"));
    fake(&half, "12.8");
    fs::remove_file(half.join("include/cuda_runtime.h")).unwrap();
    let search = Search::for_test(&[("CUDA_HOME", half.as_os_str())], &[], None, Some(&own));
    let message = cuda(&search, "cargo xtask toolkit")
        .unwrap_err()
        .to_string();
    assert!(
        message.contains(&format!(
            "CUDA_HOME: {} lacks cuda_runtime.h in include, targets/",
            half.display()
        )),
        "{message}"
    );
    for expected in [
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
    let good = folder.path().join("good");
    fake(&good, "13.0");
    for variable in ["NVCC", "MLA_CUDA_HOME"] {
        let wrong = folder.path().join("wrong/bin/nvcc");
        let search = Search::for_test(
            &[
                (variable, wrong.as_os_str()),
                ("CUDA_HOME", good.as_os_str()),
            ],
            &[],
            None,
            None,
        );
        let message = cuda(&search, "").unwrap_err().to_string();
        assert!(
            message.starts_with(&format!("{variable}: given")) && message.contains("bin/nvcc"),
            "{message}"
        );
    }
    let stray = Search::for_test(&[("NVCC", "nvcc".as_ref())], &[], None, None);
    let message = cuda(&stray, "").unwrap_err().to_string();
    assert!(
        message.contains("accepted the absolute path of bin/nvcc"),
        "{message}"
    );
    let search = Search::for_test(&[("LIBCLANG_PATH", good.as_os_str())], &[], None, None);
    assert!(
        libclang(&search, "")
            .unwrap_err()
            .to_string()
            .starts_with("LIBCLANG_PATH: given")
    );
    let search = Search::for_test(&[("MLA_CUTLASS", good.as_os_str())], &[], None, None);
    assert!(
        cutlass(&search, "")
            .unwrap_err()
            .to_string()
            .starts_with("MLA_CUTLASS: given")
    );
}

#[test]
fn a_variable_that_is_passed_over_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fake(&at("usual"), "13.0");
    fake(&at("home"), "12.8");
    fs::create_dir(at("empty")).unwrap();
    let usual = at("usual");
    for (variable, value, says) in [
        ("CUDA_HOME", PathBuf::from("/nonexistent"), "lacks bin/nvcc"),
        ("CUDA_HOME", at("home/bin"), "/home is one; "),
        ("CUDA_PATH", at("empty"), "lacks bin/nvcc"),
        ("CUDA_HOME", "~/cuda".into(), "an absolute path"),
        ("CUDA_PATH", "nope/cuda".into(), "an absolute path"),
    ] {
        let variables = [(variable, value.as_os_str())];
        let search = Search::for_test(&variables, &[&usual], None, None);
        let cuda = cuda(&search, "").unwrap();
        assert_eq!(cuda.found.path, usual);
        let warnings = search.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let start = format!("{variable}: given {value:?}, accepted ");
        let end = format!("CUDA of {} (usual folder) compiles", usual.display());
        assert!(
            warnings[0].starts_with(&start)
                && warnings[0].contains(says)
                && warnings[0].ends_with(&end),
            "{warnings:?}"
        );
        // A relative path is not a place where a toolkit may appear.
        assert!(
            earlier(&search, &cuda)
                .absent
                .iter()
                .all(|it| it.is_absolute())
        );
    }
    let whole = at("home");
    let variables = [("CUDA_HOME", whole.as_os_str())];
    let search = Search::for_test(&variables, &[&usual], None, None);
    cuda(&search, "").unwrap();
    assert_eq!(search.warnings(), [""; 0]);
}

#[test]
fn nvcc_is_one_path_and_agrees_with_the_toolkits_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fake(&at("good"), "13.0");
    fake(&at("other"), "12.8");
    let nvcc = at("good/bin/nvcc");
    let message = |variables: &[(&str, &OsStr)]| {
        let search = Search::for_test(variables, &[], None, None);
        cuda(&search, "")
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    let with_flags = format!("{} --threads 2", nvcc.display());
    let refused = message(&[("NVCC", with_flags.as_ref())]).unwrap_err();
    let expected = format!(
        "accepted the path alone, {}; flags go into NVCC_APPEND_FLAGS",
        nvcc.display()
    );
    assert!(refused.contains(&expected), "{refused}");
    let (good, other) = (at("good"), at("other"));
    message(&[("NVCC", nvcc.as_ref()), ("MLA_CUDA_HOME", good.as_ref())]).unwrap();
    let refused = message(&[("NVCC", nvcc.as_ref()), ("MLA_CUDA_HOME", other.as_ref())]);
    let refused = refused.unwrap_err();
    assert!(
        refused.starts_with("MLA_CUDA_HOME: given") && refused.contains("the toolkit of NVCC"),
        "{refused}"
    );
    for variable in ["MLA_CUDA_HOME", "MLA_CUTLASS", "LIBCLANG_PATH"] {
        let variables = [(variable, "~/cuda".as_ref())];
        let search = Search::for_test(&variables, &[], None, None);
        let refused = match variable {
            "MLA_CUDA_HOME" => cuda(&search, "").map(|_| ()),
            "MLA_CUTLASS" => cutlass(&search, "").map(|_| ()),
            _ => libclang(&search, "").map(|_| ()),
        };
        let refused = refused.unwrap_err().to_string();
        let start = format!("{variable}: given \"~/cuda\", accepted an absolute path");
        assert!(refused.starts_with(&start), "{refused}");
    }
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
            fs::create_dir_all(target.join("include")).unwrap();
            fs::create_dir_all(target.join("lib")).unwrap();
            fs::write(target.join("include/cuda_runtime.h"), "").unwrap();
            fs::write(target.join("lib/libcudart_static.a"), "").unwrap();
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
        std::os::unix::fs::symlink(format!("targets/{other}/include"), root.join("include"))
            .unwrap();
        std::os::unix::fs::symlink(format!("targets/{other}/lib"), root.join("lib")).unwrap();
        layout_for(&machine, root).unwrap_err();
        fill(machine.targets.last().unwrap());
        let (_, _, library) = layout_for(&machine, root).unwrap();
        assert!(library.starts_with(root.join("targets")), "{library:?}");
    }
}

#[test]
fn cutlass_and_libclang_are_found_in_a_wheel_with_their_versions() {
    let folder = tempfile::tempdir().unwrap();
    let include = folder.path().join("cutlass_library/source/include/cutlass");
    fs::create_dir_all(&include).unwrap();
    fs::write(include.join("cutlass.h"), "").unwrap();
    fs::write(
        include.join("version.h"),
        "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n",
    )
    .unwrap();
    fs::create_dir_all(folder.path().join("clang/native")).unwrap();
    fs::create_dir_all(folder.path().join("libclang-18.1.1.dist-info")).unwrap();
    fs::write(folder.path().join("clang/native/libclang.so"), "").unwrap();

    let search = Search::for_test(&[], &[], None, Some(folder.path()));
    assert_eq!(
        cutlass(&search, "").unwrap().version.as_deref(),
        Some("4.2.0")
    );
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
