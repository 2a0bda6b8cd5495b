//! The memory that is available for compiling.

use std::fs;

/// Bytes that new processes may take without the machine swapping or the container being killed:
/// the system's estimate, or what is left of the control group's limit where that is less. `None`
/// where the system tells neither.
pub(crate) fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_available(&text));
    let group = group_left();
    match (system, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (one, other) => one.or(other),
    }
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The minimum of what is left in the control groups (version 2) above this process.
fn group_left() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = text
        .lines()
        .find_map(|line| line.strip_prefix("0::"))?
        .trim_start_matches('/');
    let root = std::path::Path::new("/sys/fs/cgroup");
    root.join(own)
        .ancestors()
        .take_while(|folder| folder.starts_with(root))
        .filter_map(|folder| {
            let number = |name| {
                fs::read_to_string(folder.join(name))
                    .ok()?
                    .trim()
                    .parse::<u64>()
                    .ok()
            };
            // An unlimited group says `max`, which is no number.
            let limit = number("memory.max")?;
            // Pages of files can be dropped, and a build reads many files.
            let used = number("memory.current")?;
            let files = fs::read_to_string(folder.join("memory.stat"))
                .ok()
                .and_then(|text| {
                    text.lines()
                        .find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok())
                })
                .unwrap_or(0);
            Some(limit.saturating_sub(used.saturating_sub(files)))
        })
        .min()
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
