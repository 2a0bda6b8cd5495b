//! Planning a step: pure functions of lengths and dims, without a device.
