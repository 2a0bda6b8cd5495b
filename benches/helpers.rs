//! Times the helper operations of the GPU, and prints how much of the memory's bandwidth they use.
//!
//! Random normal data, shuffled pages of 64 tokens, times by the protocol of `protocol/mod.rs`.
//!
//! ```text
//! cargo bench --features sm90 --bench helpers -- --out target/bench
//! ```

#[cfg(feature = "gpu")]
mod protocol;

#[cfg(feature = "gpu")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    gpu::main()
}

#[cfg(not(feature = "gpu"))]
fn main() {
    eprintln!("nothing to time: build with --features sm90");
}

#[cfg(feature = "gpu")]
mod gpu {
    use clap::Parser as _;
    use half::bf16;
    use mla_kernels::Cuda;
    use mla_kernels::device::cudarc::driver::result::memcpy_dtod_async;
    use mla_kernels::device::{Buffer, Rotary, RotaryQuery, RotaryStyle};
    use mla_runtime::Error;
    use mla_runtime::device::{Device, GatherRows};
    use mla_runtime::model::{DType, KvFormat, MlaDims};
    use mla_runtime::tensor::{
        ArrayRef, Base2TokensFirst, BlockTable, CacheLayout, CacheMut, CacheRef, Layout, LseLayout,
        LseMut, LseRef, Memory, TensorMut, TensorRef,
    };
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom as _;
    use rand::{RngExt as _, SeedableRng as _};
    use serde::Serialize;

    use super::protocol::{Arguments, Result, Stopwatch, Times, upload};

    // Measured rate of streaming reads of an H200, to which figures are relative.
    const STREAM_BYTES_PER_SECOND: f64 = 4.17e12;
    const PAGE: usize = 64;
    const DIMS: MlaDims = MlaDims::R1;
    const ROW: usize = 576;

    #[derive(Serialize)]
    struct Figure {
        name: String,
        bytes: usize,
        median_us: f64,
        least_us: f64,
        gb_per_s: f64,
        fraction_of_stream: f64,
        samples: usize,
    }

    struct Bench {
        gpu: Cuda,
        stopwatch: Stopwatch,
        arguments: Arguments,
        figures: Vec<Figure>,
    }

    pub(super) fn main() -> Result<()> {
        let arguments = Arguments::parse();
        let gpu = Cuda::new(0)?;
        println!("{gpu:?}");
        println!(
            "{:44} {:>10} {:>10} {:>9} {:>8}",
            "case", "median us", "least us", "GB/s", "stream"
        );
        let mut bench = Bench {
            stopwatch: Stopwatch::new(&gpu, arguments.samples)?,
            gpu,
            arguments,
            figures: Vec::new(),
        };
        bench.writes()?;
        bench.gathers()?;
        bench.merges()?;
        bench.others()?;
        bench.copies()?;
        bench.arguments.save("helpers.json", &bench.figures)
    }

    // Makes normal numbers, a million of them over and over.
    fn normal(gpu: &Cuda, elements: usize, dtype: DType) -> Result<Buffer> {
        let mut rng = StdRng::seed_from_u64(7);
        let block: Vec<f32> = (0..elements.min(1 << 20))
            .map(|_| {
                let (u, v) = (rng.random::<f32>().max(1e-9), rng.random::<f32>());
                (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
            })
            .collect();
        let values = block.iter().cycle().take(elements);
        let bytes: Vec<u8> = match dtype {
            DType::F32 => values.flat_map(|x| x.to_le_bytes()).collect(),
            _ => values
                .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
                .collect(),
        };
        upload(gpu, &bytes)
    }

    fn contiguous(dtype: DType, shape: [usize; 3]) -> Layout {
        Layout::contiguous(dtype, shape)
    }

    fn tensor(buffer: &Buffer, layout: Layout) -> mla_runtime::Result<TensorRef<'_, Cuda>> {
        TensorRef::new(buffer.bytes(), layout)
    }

    fn output(buffer: &mut Buffer, layout: Layout) -> mla_runtime::Result<TensorMut<'_, Cuda>> {
        TensorMut::new(buffer.bytes_mut(), layout)
    }

    // Returns slots of tokens in order within shuffled pages, like an engine's.
    fn shuffled_pages(pages: usize) -> Vec<i32> {
        let mut order: Vec<i32> = (0..pages as i32).collect();
        order.shuffle(&mut StdRng::seed_from_u64(11));
        order
    }

    impl Bench {
        fn time(
            &mut self,
            name: String,
            bytes: usize,
            operation: impl FnMut(&Cuda) -> mla_runtime::Result<()>,
        ) -> Result<()> {
            if self.arguments.skips(&name) {
                return Ok(());
            }
            let Times { median, least } = self.stopwatch.time(&self.gpu, operation)?;
            let rate = bytes as f64 / (median * 1e-6);
            println!(
                "{name:44} {median:10.2} {least:10.2} {:9.0} {:7.1}%",
                rate / 1e9,
                100.0 * rate / STREAM_BYTES_PER_SECOND
            );
            self.figures.push(Figure {
                name,
                bytes,
                median_us: median,
                least_us: least,
                gb_per_s: rate / 1e9,
                fraction_of_stream: rate / STREAM_BYTES_PER_SECOND,
                samples: self.arguments.samples,
            });
            Ok(())
        }

        fn writes(&mut self) -> Result<()> {
            for tokens in [128usize, 8192, 65536] {
                for format in [KvFormat::BF16, KvFormat::Fp8, KvFormat::Fp8DsMla] {
                    for heads in [None, Some(16)] {
                        self.write(tokens, format, heads)?;
                    }
                }
            }
            Ok(())
        }

        /// Times the write of `tokens` rows, also with a rotation, of them and of queries.
        fn write(&mut self, tokens: usize, format: KvFormat, heads: Option<usize>) -> Result<()> {
            let gpu = self.gpu.clone();
            let layout = CacheLayout::contiguous(DIMS, format, tokens.div_ceil(PAGE) + 7, PAGE);
            let pages = shuffled_pages(layout.pages);
            let slots: Vec<i64> = (0..tokens)
                .map(|token| i64::from(pages[token / PAGE]) * PAGE as i64 + (token % PAGE) as i64)
                .collect();
            let latent = normal(&gpu, tokens * 512, DType::BF16)?;
            let rope = normal(&gpu, tokens * 64, DType::BF16)?;
            let slots = upload(&gpu, &slots)?;
            let mut cache = gpu.allocate(layout.pages * layout.page_stride)?;
            let positions: Vec<i64> = (0..tokens as i64).map(|token| token % 4096).collect();
            let positions = upload(&gpu, &positions)?;
            let table = normal(&gpu, 4096 * 64, DType::F32)?;
            let angles = Layout {
                dtype: DType::F32,
                shape: [1, 4096, 32],
                strides: [0, 64, 1],
            };
            let query_layout = contiguous(DType::BF16, [tokens, heads.unwrap_or(0), 64]);
            let mut query = normal(&gpu, query_layout.elements().max(1), DType::BF16)?;
            let mut bytes = tokens * (2 * ROW + 8 + format.row_bytes(DIMS));
            let mut name = format!("cache write {format}, {tokens} tokens");
            if let Some(heads) = heads {
                bytes += tokens * 8 + tokens.min(4096) * 256 + 2 * tokens * heads * 128;
                name += &format!(", rotary, {heads} heads");
            }
            self.time(name, bytes, |gpu| {
                let latent = tensor(&latent, contiguous(DType::BF16, [tokens, 1, 512]))?;
                let rope = tensor(&rope, contiguous(DType::BF16, [tokens, 1, 64]))?;
                let slots = ArrayRef::new(slots.bytes(), tokens)?;
                let cache = CacheMut::new(cache.bytes_mut(), layout)?;
                if heads.is_none() {
                    return gpu.write_cache(latent, rope, slots, cache);
                }
                let rotary = Rotary::new(
                    ArrayRef::new(positions.bytes(), tokens)?,
                    [
                        tensor(&table, angles)?,
                        TensorRef::new(Cuda::byte_range(table.bytes(), 128..table.len()), angles)?,
                    ],
                    RotaryStyle::Interleaved,
                );
                let query = RotaryQuery::InPlace(output(&mut query, query_layout)?);
                gpu.write_cache_rotated(latent, rope, &rotary, Some(query), slots, cache)
            })
        }

        fn gathers(&mut self) -> Result<()> {
            let gpu = self.gpu.clone();
            for (rows, segments) in [(8192usize, 4usize), (65536, 1), (65536, 32), (65536, 1024)] {
                for format in [KvFormat::BF16, KvFormat::Fp8, KvFormat::Fp8DsMla] {
                    let each = rows / segments;
                    let max_pages = each.div_ceil(PAGE);
                    let layout = CacheLayout::contiguous(DIMS, format, segments * max_pages, PAGE);
                    let table = upload(&gpu, &shuffled_pages(layout.pages))?;
                    let token_starts = upload(&gpu, &vec![0i32; segments])?;
                    let row_starts: Vec<i32> = (0..=segments)
                        .map(|segment| (segment * each) as i32)
                        .collect();
                    let row_starts = upload(&gpu, &row_starts)?;
                    let cache = normal(&gpu, layout.pages * layout.page_stride / 2, DType::BF16)?;
                    let (mut latent, mut rope) =
                        (gpu.allocate(rows * 1024)?, gpu.allocate(rows * 128)?);
                    let bytes = rows * (format.row_bytes(DIMS) + 2 * ROW);
                    let name = format!("gather {format}, {rows} rows, {segments} segments");
                    self.time(name, bytes, |gpu| {
                        let table = ArrayRef::new(table.bytes(), layout.pages)?;
                        gpu.gather_cache(
                            CacheRef::new(cache.bytes(), layout)?,
                            GatherRows::new(
                                BlockTable::new(table, segments, max_pages)?,
                                ArrayRef::new(token_starts.bytes(), segments)?,
                                ArrayRef::new(row_starts.bytes(), segments + 1)?,
                                rows,
                            ),
                            output(&mut latent, contiguous(DType::BF16, [rows, 1, 512]))?,
                            output(&mut rope, contiguous(DType::BF16, [rows, 1, 64]))?,
                        )
                    })?;
                }
            }
            Ok(())
        }

        fn merges(&mut self) -> Result<()> {
            let gpu = self.gpu.clone();
            for (tokens, heads, width, dtype) in [
                (4096, 128, 128, DType::BF16),
                (4096, 128, 128, DType::F32),
                (4096, 16, 128, DType::BF16),
                (512, 128, 128, DType::BF16),
                (128, 128, 512, DType::BF16),
            ] {
                let layout = contiguous(dtype, [tokens, heads, width]);
                let (mut out, other) = (
                    normal(&gpu, layout.elements(), dtype)?,
                    normal(&gpu, layout.elements(), dtype)?,
                );
                let mut lse = normal(&gpu, tokens * heads, DType::F32)?;
                let other_lse = normal(&gpu, tokens * heads, DType::F32)?;
                let bytes = 3 * layout.elements() * dtype.bytes() + 3 * 4 * tokens * heads;
                let states = LseLayout::heads_first(heads, tokens);
                let name = format!("merge {dtype}, {tokens} tokens x {heads} heads x {width}");
                self.time(name, bytes, |gpu| {
                    gpu.merge(
                        output(&mut out, layout)?,
                        LseMut::new(lse.bytes_mut(), states)?,
                        tensor(&other, layout)?,
                        LseRef::new(other_lse.bytes(), states)?,
                    )
                })?;
            }
            Ok(())
        }

        fn others(&mut self) -> Result<()> {
            let gpu = self.gpu.clone();
            let (tokens, heads) = (8192, 128);
            let from = normal(&gpu, tokens * 64, DType::BF16)?;
            let mut to = gpu.allocate(tokens * heads * 128)?;
            let bytes = tokens * 128 * (heads + 1);
            self.time(
                format!("repeat a rotary key, {tokens} tokens x {heads} heads"),
                bytes,
                |gpu| {
                    let from = tensor(&from, contiguous(DType::BF16, [tokens, 1, 64]))?
                        .broadcast(1, heads)?;
                    gpu.copy(
                        from,
                        output(&mut to, contiguous(DType::BF16, [tokens, heads, 64]))?,
                    )
                },
            )?;
            let (tokens, heads) = (16384, 128);
            let from = normal(&gpu, tokens * heads, DType::F32)?;
            let mut to = gpu.allocate(tokens * heads * 4)?;
            let states = LseLayout::heads_first(heads, tokens);
            self.time(
                format!("natural log-sum-exp, {tokens} tokens x {heads} heads"),
                tokens * heads * 8,
                |gpu| {
                    let from = LseRef::<Cuda, Base2TokensFirst>::new(
                        from.bytes(),
                        LseLayout {
                            row_stride: heads,
                            ..states
                        },
                    )?;
                    gpu.convert_lse(from, LseMut::new(to.bytes_mut(), states)?)
                },
            )
        }

        // Times the driver's copy of as many bytes, without slots, pages and arithmetic: half of
        // them are read, half written.
        fn copies(&mut self) -> Result<()> {
            let gpu = self.gpu.clone();
            for bytes in [8192 * 4 * ROW, 65536 * 3 * ROW, 65536 * 4 * ROW] {
                let from = normal(&gpu, bytes / 4, DType::BF16)?;
                let to = gpu.allocate(bytes / 2)?;
                let name = format!("the driver's copy, {:.1} MB", bytes as f64 / 1e6);
                self.time(name, bytes, |gpu| {
                    // SAFETY: both hold half of the bytes, and only this stream uses them.
                    unsafe {
                        memcpy_dtod_async(
                            to.address(),
                            from.address(),
                            bytes / 2,
                            gpu.stream().cu_stream(),
                        )
                    }
                    .map_err(|error| Error::Device {
                        device: "cuda",
                        operation: "copy",
                        message: error.to_string(),
                    })
                })?;
            }
            Ok(())
        }
    }
}
