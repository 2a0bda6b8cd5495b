//! The first drivers for releases of CUDA. `cargo xtask release` reads this file, too.

/// The first driver for each release of CUDA, from its release notes. Objects of one release run on
/// later drivers. Their machine code also runs on the first driver of the same major release.
const DRIVERS: &[([u32; 2], &str)] = &[
    ([12, 0], "R525"),
    ([12, 1], "R530"),
    ([12, 2], "R535"),
    ([12, 3], "R545"),
    ([12, 4], "R550"),
    ([12, 5], "R555"),
    ([12, 6], "R560"),
    ([12, 8], "R570"),
    ([12, 9], "R575"),
    ([13, 0], "R580"),
];

/// Returns the first driver for a release of CUDA, if it is known.
pub(crate) fn first(release: [u32; 2]) -> Option<&'static str> {
    let known = DRIVERS.iter().find(|(known, _)| *known == release);
    known.map(|(_, driver)| *driver)
}
