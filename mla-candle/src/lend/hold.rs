//! The simultaneous locks of all storages of a call.

use std::cell::RefCell;

use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Result, Storage, Tensor};

/// Returns the number of a tensor's storage. It is the storage's address, which is unique while the
/// tensor is alive.
pub(super) fn storage_of(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

/// The storages that are locked so far, by number.
#[derive(Default)]
pub(super) struct Held<'a> {
    read: Vec<(usize, &'a Storage)>,
    written: Vec<(usize, Written<'a>)>,
}

/// A storage that this call alone has locked.
pub(super) enum Written<'a> {
    Cpu(&'a mut CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(&'a mut candle_core::CudaStorage),
}

impl<'a> Written<'a> {
    pub(super) fn cpu(self) -> Option<&'a mut CpuStorage> {
        match self {
            Self::Cpu(storage) => Some(storage),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }
}

impl<'a> Held<'a> {
    /// Returns a storage for reading.
    pub(super) fn read(&self, number: usize) -> &'a Storage {
        let found = self.read.iter().find(|(other, _)| *other == number);
        found.expect("every storage that is read is held").1
    }

    /// Takes a storage for writing. Each can be taken once.
    pub(super) fn take_written(&mut self, number: usize) -> Written<'a> {
        let at = self.written.iter().position(|(other, _)| *other == number);
        let at = at.expect("every storage that is written is held, for one tensor");
        self.written.swap_remove(at).1
    }
}

/// A storage to lock, with the tensor through which it is locked.
#[derive(Clone, Copy)]
struct Lock<'t> {
    number: usize,
    tensor: &'t Tensor,
    writes: bool,
}

/// Locks the storage of each tensor once, and calls `work` with the storages.
pub(super) fn hold<R>(
    read: &[&Tensor],
    written: &[&Tensor],
    work: impl FnOnce(Held<'_>) -> Result<R>,
) -> Result<R> {
    let mut locks: Vec<Lock<'_>> = Vec::with_capacity(read.len() + written.len());
    for (tensors, writes) in [(written, true), (read, false)] {
        for tensor in tensors {
            let number = storage_of(tensor);
            match locks.iter().find(|lock| lock.number == number) {
                Some(Lock { writes: false, .. }) => {}
                Some(_) => {
                    return Err(Error::msg(
                        "written tensor: given one that shares its storage with another tensor of \
                         the call, accepted one with a storage of its own",
                    ));
                }
                None => locks.push(Lock {
                    number,
                    tensor,
                    writes,
                }),
            }
        }
    }
    locks.sort_by_key(|lock| lock.number);
    let (mut work, mut done) = (Some(work), None);
    hold_next(&locks, Held::default(), &mut |held| {
        let work = work.take().expect("called once");
        done = Some(work(held)?);
        Ok(())
    })?;
    Ok(done.expect("without an error the work was done"))
}

type Then<'t> = dyn FnMut(Held<'_>) -> Result<()> + 't;

fn hold_next(locks: &[Lock<'_>], held: Held<'_>, then: &mut Then<'_>) -> Result<()> {
    let Some((lock, rest)) = locks.split_first() else {
        return then(held);
    };
    if lock.writes {
        let state = RefCell::new(Some((held, then)));
        let number = lock.number;
        return lock.tensor.inplace_op1(&Writing {
            number,
            rest,
            state,
        });
    }
    let (storage, _) = lock.tensor.storage_and_layout();
    // The shortened lifetime ends while this storage is still locked.
    let mut held: Held<'_> = held;
    held.read.push((lock.number, &storage));
    hold_next(rest, held, then)
}

/// The in-place operation that gives write access to a storage. It runs once.
struct Writing<'h, 'l, 't> {
    number: usize,
    rest: &'h [Lock<'l>],
    state: RefCell<Option<(Held<'h>, &'h mut Then<'t>)>>,
}

impl Writing<'_, '_, '_> {
    fn go_on(&self, storage: Written<'_>) -> Result<()> {
        let state = self.state.take();
        let (held, then) = state.ok_or_else(|| Error::msg("candle ran an operation twice"))?;
        let mut held: Held<'_> = held;
        held.written.push((self.number, storage));
        hold_next(self.rest, held, then)
    }
}

impl InplaceOp1 for Writing<'_, '_, '_> {
    fn name(&self) -> &'static str {
        "mla"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.go_on(Written::Cpu(storage))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, _: &Layout) -> Result<()> {
        self.go_on(Written::Cuda(storage))
    }
}
