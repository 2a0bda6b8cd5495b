//! The memory that is available for compiling.

use std::{fs, path::Path};

/// Returns the bytes that new processes may use without the machine swapping or the container being
/// killed.
///
/// This is the system's estimate, or what is left of the control group's limit if that is less.
/// Returns `None` if the system reports neither.
pub(crate) fn available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok();
    let system = meminfo.and_then(|text| mem_available(&text));
    system.into_iter().chain(group_left()).min()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let kib = value(meminfo, "MemAvailable:")?.strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the text behind a key at the start of a line.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix(key)).map(str::trim)
}

/// Returns the minimum of what is left in the control groups (version 2) above this process.
fn group_left() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(value(&text, "0::")?.trim_start_matches('/'));
    let groups = own
        .ancestors()
        .take_while(|folder| folder.starts_with(root));
    let left = groups.filter_map(|folder| {
        let read = |name| fs::read_to_string(folder.join(name)).ok();
        let number = |name| read(name)?.trim().parse::<u64>().ok();
        // An unlimited group has `max` here, which is not a number.
        let limit = number("memory.max")?;
        // The system can drop pages of files, and a build reads many files.
        let stat = read("memory.stat").unwrap_or_default();
        let files = value(&stat, "inactive_file ").and_then(|files| files.parse().ok());
        let used = number("memory.current")?.saturating_sub(files.unwrap_or(0));
        Some(limit.saturating_sub(used))
    });
    left.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(mem_available(text), Some(2048 * 1024));
        assert_eq!(mem_available("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn this_machine_has_some() {
        if std::path::Path::new("/proc/meminfo").exists() {
            assert!(available().unwrap() > 1 << 20);
        }
    }
}
