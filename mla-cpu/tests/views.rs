//! Typed slices as tensors, one element at a time.

use mla_cpu::Cpu;
use mla_runtime::Result;
use mla_runtime::lse::LseMut;
use mla_runtime::tensor::{ArrayRef, TensorMut, TensorRef};

#[test]
fn elements_are_found_by_strides() -> Result<()> {
    let data: Vec<half::bf16> = (0..24).map(|i| half::bf16::from_f32(i as f32)).collect();
    let tensor = TensorRef::<Cpu>::from_slice(&data, [2, 3, 4])?.transpose(0, 1);
    assert_eq!(tensor.at([2, 1, 3]), 23.0);
    assert_eq!(tensor.at([1, 0, 2]), 6.0);
    let mut written = [0.0f32; 24];
    let mut tensor = TensorMut::<Cpu>::from_slice(&mut written, [2, 3, 4])?.transpose(0, 1);
    tensor.set([2, 1, 3], 7.0);
    assert_eq!(written[23], 7.0);
    assert_eq!(ArrayRef::<Cpu, i32>::from_slice(&[3, -4]).at(1), -4);
    let mut lse = [0.0; 6];
    LseMut::<Cpu>::from_slice(&mut lse, 2, 3)?.set(1, 2, 9.0);
    assert_eq!(lse[5], 9.0);
    Ok(())
}
