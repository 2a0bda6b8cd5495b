//! Operations of a device that forwards them to the processor's device. Views are converted for it.

use mla_cpu::Cpu;
pub(crate) use mla_runtime::Result;
pub(crate) use mla_runtime::backend::{
    DecodeBatch, DecodeCall, Keys, Output, PrefillCall, Query, SlotLists,
};
pub(crate) use mla_runtime::device::{Device, Fp8Blocks, GatherRows};
pub(crate) use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheMut, CacheRef, LseConvention, LseMut, LseRef, Memory, Rotary,
    TensorMut, TensorRef,
};

/// A view that can be converted to a view of the same memory on the processor's device.
pub(crate) trait OnCpu {
    type View;

    fn on_cpu(self) -> Result<Self::View>;
}

/// A device in the host's memory.
pub(crate) trait Host:
    Device + for<'a> Memory<Bytes<'a> = &'a [u8], BytesMut<'a> = &'a mut [u8]>
{
}

impl<D> Host for D where
    D: Device + for<'a> Memory<Bytes<'a> = &'a [u8], BytesMut<'a> = &'a mut [u8]>
{
}

/// Implements the conversion for views. Each row has an expression of the converted view.
macro_rules! views {
    ($($view:ident $([$parameter:ident: $bound:ident])? $(<$element:ty>)?,
        |$it:ident| $same:expr;)*) => {
        $(impl<'a, D: Host $(, $parameter: $bound)?> OnCpu
            for $view<'a, D $(, $parameter)? $(, $element)?>
        {
            type View = $view<'a, Cpu $(, $parameter)? $(, $element)?>;

            fn on_cpu(self) -> Result<Self::View> {
                let $it = self;
                $same
            }
        })*
    };
}

views! {
    TensorRef, |tensor| TensorRef::new(tensor.bytes(), *tensor.layout());
    TensorMut, |tensor| {
        let layout = *tensor.layout();
        TensorMut::new(tensor.into_bytes(), layout)
    };
    ArrayRef<i32>, |array| ArrayRef::new(array.bytes(), array.len());
    ArrayRef<i64>, |array| ArrayRef::new(array.bytes(), array.len());
    ArrayRef<f32>, |array| ArrayRef::new(array.bytes(), array.len());
    BlockTable, |table| {
        BlockTable::new(table.entries().on_cpu()?, table.requests(), table.max_pages())
    };
    CacheRef, |cache| match (*cache.layout(), cache.layout().is_split()) {
        (layout, true) => CacheRef::split(cache.bytes(), cache.rope_bytes(), layout),
        (layout, false) => CacheRef::new(cache.bytes(), layout),
    };
    CacheMut, |cache| {
        let layout = *cache.layout();
        match cache.into_parts() {
            (latents, Some(rope)) => CacheMut::split(latents, rope, layout),
            (rows, None) => CacheMut::new(rows, layout),
        }
    };
    LseRef[C: LseConvention], |lse| LseRef::new(lse.bytes(), lse.layout());
    LseMut, |lse| {
        let layout = lse.layout();
        LseMut::new(lse.into_bytes(), layout)
    };
    GatherRows, |rows| Ok(GatherRows::new(
        rows.block_table.on_cpu()?,
        rows.token_starts.on_cpu()?,
        rows.row_starts.on_cpu()?,
        rows.rows,
    ));
    Fp8Blocks, |blocks| {
        let scales = blocks.scales().on_cpu()?;
        Fp8Blocks::from_row(blocks.codes(), scales, blocks.shape(), blocks.first_row())
    };
    SlotLists, |lists| Ok(SlotLists::new(lists.slots.on_cpu()?, lists.width)
        .with_counts(lists.counts.map(OnCpu::on_cpu).transpose()?)
        .with_dense_within(lists.dense_within)
        .with_second(match lists.second {
            Some((cache, slots, width)) => Some((cache.on_cpu()?, slots.on_cpu()?, width)),
            None => None,
        }));
}

/// Implements the conversion for borrowed calls and their parts.
macro_rules! borrowed {
    ($($view:ident, |$it:ident: $borrow:ty| $same:expr;)*) => {
        $(impl<'s, D: Host> OnCpu for $borrow {
            type View = $view<'s, Cpu>;

            fn on_cpu(self) -> Result<Self::View> {
                let $it = self;
                $same
            }
        })*
    };
}

borrowed! {
    Rotary, |rotary: &'s Rotary<'_, D>| {
        let tables = [rotary.cos.shorten().on_cpu()?, rotary.sin.shorten().on_cpu()?];
        let positions = rotary.positions.as_ref().map(|positions| positions.shorten().on_cpu());
        Ok(Rotary::new(positions.transpose()?, tables, rotary.style))
    };
    Output, |out: &'s mut Output<'_, D>| Ok(match out {
        Output::Plain(to) => Output::Plain(to.reborrow().on_cpu()?),
        Output::Fp8 { bytes, scale } => Output::Fp8 { bytes, scale: *scale },
    });
    DecodeBatch, |batch: &'s DecodeBatch<'_, D>| {
        let (table, lens) = (&batch.block_table, batch.seq_lens.shorten());
        let entries = table.entries().shorten().on_cpu()?;
        let mut same = DecodeBatch::new(
            BlockTable::new(entries, table.requests(), table.max_pages())?,
            (lens.on_cpu()?, batch.max_seq_len),
            (batch.query_starts.shorten().on_cpu()?, batch.max_query_len),
        )
        .with_causal(batch.causal);
        same.host = batch.host;
        Ok(same)
    };
    DecodeCall, |call: &'s mut DecodeCall<'_, D>| {
        let query = match &call.query {
            Query::Concatenated(query) => Query::Concatenated(query.shorten().on_cpu()?),
            Query::Split { latent, rope } => Query::Split {
                latent: latent.shorten().on_cpu()?,
                rope: rope.shorten().on_cpu()?,
            },
        };
        let (cache, batch) = (call.cache.shorten().on_cpu()?, call.batch.on_cpu()?);
        let lse = call.lse.as_mut().map(|lse| lse.reborrow().on_cpu());
        let slots = call.slots.as_ref().map(|slots| slots.shorten().on_cpu());
        let sinks = call.sinks.as_ref().map(|sinks| sinks.shorten().on_cpu());
        let scales = call.query_scales.as_ref().map(|scales| scales.shorten().on_cpu());
        Ok(DecodeCall::new(query, cache, batch, call.out.on_cpu()?)
            .with_lse(lse.transpose()?)
            .with_slots(slots.transpose()?)
            .with_sinks(sinks.transpose()?)
            .with_query_scales(scales.transpose()?))
    };
    PrefillCall, |call: &'s mut PrefillCall<'_, D>| {
        let keys = match &call.keys {
            Keys::Packed(keys) => Keys::Packed(keys.shorten().on_cpu()?),
            Keys::Split { nope, rope } => Keys::Split {
                nope: nope.shorten().on_cpu()?,
                rope: rope.shorten().on_cpu()?,
            },
        };
        let [query, values] = [&call.query, &call.values].map(|tensor| tensor.shorten());
        let queries = (call.query_starts.shorten().on_cpu()?, call.max_query_len);
        let of_keys = (call.key_starts.shorten().on_cpu()?, call.max_key_len);
        let lse = call.lse.as_mut().map(|lse| lse.reborrow().on_cpu());
        let scales = call.query_scales.as_ref().map(|scales| scales.shorten().on_cpu());
        let (query, values, out) = (query.on_cpu()?, values.on_cpu()?, call.out.on_cpu()?);
        Ok(PrefillCall::new(query, keys, values, out, queries, of_keys)
            .with_lse(lse.transpose()?)
            .with_chunk(call.chunk)
            .with_query_scales(scales.transpose()?)
            .with_causal(call.causal))
    };
}

/// The operations of an `impl Device`. Each first calls `self.operation()`, which counts it. The
/// result is an error, the processor's device for the operation, or `None` if nothing must be done.
/// A file that calls the macro imports the same names as this module.
macro_rules! forwarded_operations {
    () => {
        forwarded_operations! {
            gemm(a: TensorRef, b: TensorRef, c: TensorMut);
            copy(from: TensorRef, to: TensorMut);
            scatter_rows(from: TensorRef, places: ArrayRef[i64], to: TensorMut);
            dequantize_blocks(from: Fp8Blocks, to: TensorMut);
            clear(to: TensorMut);
            write_cache(latent: TensorRef, rope: TensorRef, slots: ArrayRef[i64], cache: CacheMut);
            gather_cache(from: CacheRef, rows: GatherRows, latent: TensorMut, rope: TensorMut);
            merge(out: TensorMut, lse: LseMut, other: TensorRef, other_lse: LseRef);
        }

        fn write_cache_rotated(
            &self,
            latent: TensorRef<'_, Self>,
            rope: TensorRef<'_, Self>,
            angles: &Rotary<'_, Self>,
            query: Option<(TensorRef<'_, Self>, TensorMut<'_, Self>)>,
            slots: ArrayRef<'_, Self, i64>,
            cache: CacheMut<'_, Self>,
        ) -> Result<()> {
            let Some(cpu) = self.operation()? else {
                return Ok(());
            };
            let (latent, rope, angles) = (latent.on_cpu()?, rope.on_cpu()?, angles.on_cpu()?);
            let query = match query {
                Some((from, to)) => Some((from.on_cpu()?, to.on_cpu()?)),
                None => None,
            };
            cpu.write_cache_rotated(
                latent,
                rope,
                &angles,
                query,
                slots.on_cpu()?,
                cache.on_cpu()?,
            )
        }

        fn rotate(&self, angles: &Rotary<'_, Self>, vectors: TensorMut<'_, Self>) -> Result<()> {
            match self.operation()? {
                Some(cpu) => cpu.rotate(&angles.on_cpu()?, vectors.on_cpu()?),
                None => Ok(()),
            }
        }

        fn scales_outputs(&self) -> bool {
            true
        }

        fn scale_outputs(
            &self,
            out: TensorMut<'_, Self>,
            sinks: Option<(ArrayRef<'_, Self, f32>, LseRef<'_, Self>)>,
            gate: Option<TensorRef<'_, Self>>,
        ) -> Result<()> {
            let Some(cpu) = self.operation()? else {
                return Ok(());
            };
            let sinks = match sinks {
                Some((sinks, lse)) => Some((sinks.on_cpu()?, lse.on_cpu()?)),
                None => None,
            };
            cpu.scale_outputs(out.on_cpu()?, sinks, gate.map(OnCpu::on_cpu).transpose()?)
        }

        fn convert_lse<C: LseConvention>(
            &self,
            from: LseRef<'_, Self, C>,
            to: LseMut<'_, Self>,
        ) -> Result<()> {
            match self.operation()? {
                Some(cpu) => cpu.convert_lse(from.on_cpu()?, to.on_cpu()?),
                None => Ok(()),
            }
        }
    };
    ($($name:ident($($argument:ident: $view:ident $([$element:ty])?),*);)*) => {
        $(fn $name(&self, $($argument: $view<'_, Self $(, $element)?>),*) -> Result<()> {
            match self.operation()? {
                Some(cpu) => cpu.$name($($argument.on_cpu()?),*),
                None => Ok(()),
            }
        })*
    };
}
