//! Tests of everything but CUTLASS's kernel, on any GPU. A stand-in attends on the host, and reads
//! the same memory as the kernel.

use std::ffi::c_void;

use mla_kernels::device::cudarc::driver::sys;

use super::*;

struct StandIn(CutlassMla);

#[mla_backend(
    name = "CUTLASS_MLA_STAND_IN",
    sm = "compiled",
    compiled = "compiled::SM100|compiled::SM90|compiled::SM80",
    dtypes = "f16,bf16",
    cache_dims = "(512,64)",
    alignment = 16,
    heads = "1..=128",
    page_sizes = "16|32|64|128",
    query_len = "single",
    features = "strided_outputs"
)]
impl DecodeBackend for StandIn {
    type Device = Cuda;
    type State = CutlassMlaState;
    type Metadata = ();

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self(CutlassMla::with(config, attend_on_the_host)))
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<CutlassMlaState> {
        self.0.state(device, limits)
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut CutlassMlaState,
        (): &(),
    ) -> Result<()> {
        // SAFETY: the caller keeps to the same contract.
        unsafe { self.0.decode(device, call, state, &()) }
    }
}

mla_conformance::decode_conformance!(
    #[ignore = "needs a GPU: \
        cargo test --package mla-flashinfer --features sm90,sm100 --lib -- --include-ignored"]
    StandIn,
    Cuda::new(0).expect("a GPU that the kernels were built for")
);

/// Copies `len` values from an address of the device's memory.
fn read<T: Copy + Default>(address: *const T, len: usize) -> Vec<T> {
    let mut host = vec![T::default(); len];
    // SAFETY: the host's memory has this length. The driver refuses memory that is not the
    // device's.
    let status = unsafe {
        let to = host.as_mut_ptr().cast();
        sys::cuMemcpyDtoH_v2(to, address as u64, size_of_val(&host[..]))
    };
    status.result().expect("device memory");
    host
}

fn write<T>(address: *mut T, host: &[T]) {
    // SAFETY: the slice has this length. The driver refuses memory that is not the device's.
    let status = unsafe {
        let from = host.as_ptr().cast();
        sys::cuMemcpyHtoD_v2(address as u64, from, size_of_val(host))
    };
    status.result().expect("device memory");
}

/// A call whose tensors are read and written from the host.
struct OnTheHost<'a>(&'a ffi::FiCutlassMla);

impl OnTheHost<'_> {
    fn row(&self, base: *const c_void, element: i64, len: usize) -> Vec<f32> {
        let number = |bits: u16| match self.0.dtype {
            0 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        };
        let address = base.cast::<u16>().wrapping_offset(element as isize);
        read(address, len).into_iter().map(number).collect()
    }

    fn query(&self, request: usize, head: usize) -> Vec<f32> {
        let row = LATENT + ROPE;
        self.row(self.0.query, ((request * HEADS + head) * row) as i64, row)
    }

    /// Returns all rows of every tile in which a request has keys, as the kernel reads them.
    fn rows(&self, table: &[i32], len: usize) -> Vec<Vec<f32>> {
        let page_size = self.0.page_size as usize;
        let tokens = 0..len.next_multiple_of(TILE);
        tokens
            .map(|token| {
                let page = table[token / page_size];
                assert!((0..self.0.page_count).contains(&page), "page {page}");
                let at = i64::from(page) * self.0.page_stride
                    + (token % page_size) as i64 * self.0.row_stride;
                self.row(self.0.cache, at, LATENT + ROPE)
            })
            .collect()
    }

    fn write(&self, request: usize, head: usize, (out, lse): (Vec<f32>, f32)) {
        let bits = |value: f32| match self.0.dtype {
            0 => half::f16::from_f32(value).to_bits(),
            _ => half::bf16::from_f32(value).to_bits(),
        };
        let out: Vec<u16> = out.into_iter().map(bits).collect();
        let place = request * HEADS + head;
        write(self.0.out.cast::<u16>().wrapping_add(place * LATENT), &out);
        write(self.0.lse.wrapping_add(place), &[lse]);
    }
}

/// Returns the output and the log-sum-exp of a query that sees the first `len` rows.
fn attend(query: &[f32], rows: &[Vec<f32>], len: usize, softmax_scale: f32) -> (Vec<f32>, f32) {
    let score = |row: &Vec<f32>| -> f32 {
        let products = row.iter().zip(query).map(|(a, b)| a * b);
        products.sum::<f32>() * softmax_scale
    };
    let scores: Vec<f32> = rows.iter().map(score).collect();
    let max = scores[..len].iter().copied().fold(f32::MIN, f32::max);
    let seen = scores[..len].iter().map(|score| (score - max).exp());
    let weights: Vec<f32> = seen
        .chain(std::iter::repeat(0.0))
        .take(rows.len())
        .collect();
    let sum: f32 = weights.iter().sum();
    let mut out = vec![0.0; LATENT];
    for (weight, row) in weights.iter().zip(rows) {
        // Values with a weight of 0 are included, since NaN times 0 is NaN.
        for (out, value) in out.iter_mut().zip(row) {
            *out += weight * value;
        }
    }
    out.iter_mut().for_each(|value| *value /= sum);
    (out, max + sum.ln())
}

unsafe extern "C" fn attend_on_the_host(
    call: *const ffi::FiCutlassMla,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller passes a call that lives, and the stream on which its tensors are written.
    let call = unsafe {
        sys::cuStreamSynchronize(stream.cast()).result().unwrap();
        OnTheHost(&*call)
    };
    let [requests, width] = [call.0.requests, call.0.table_width].map(|extent| extent as usize);
    let lens = read(call.0.seq_lens, requests);
    let table = read(call.0.block_table, requests * width);
    for (request, table) in table.chunks(width).enumerate() {
        let len = lens[request] as usize;
        assert!(0 < len && len <= width * call.0.page_size as usize);
        let rows = call.rows(table, len);
        for head in 0..HEADS {
            let query = call.query(request, head);
            let attended = attend(&query, &rows, len, call.0.softmax_scale);
            call.write(request, head, attended);
        }
    }
    0
}
