//! The operations of a device that an indexer needs.

use std::ops::Range;

use super::IndexCacheMut;
use crate::backend::DecodeBatch;
use crate::device::{CacheRows, Device};
use crate::model::DType;
use crate::model::IndexerConfig;
use crate::setters::{options, setters};
use crate::tensor::{ArrayRef, Rotary, TensorMut, TensorRef};
use crate::{Error, Result, check_len};

/// The new tokens' index keys, and their destination in the cache.
#[non_exhaustive]
pub struct IndexKeys<'a, D: Device> {
    /// `[T, 1, D]`: W_k · x, neither normalised nor rotated.
    pub keys: TensorRef<'a, D>,
    /// The weight and the bias of the keys' LayerNorm, each `[1, 1, D]` of any dtype. The norm is
    /// (x − mean) / √(variance + epsilon) · weight + bias.
    pub norm: [TensorRef<'a, D>; 2],
    /// The rotation of the first R values, if the model has one.
    pub rotary: Option<Rotary<'a, D>>,
    /// The slot of each token, or −1 for none: `[T]`. Slots must differ.
    pub slots: ArrayRef<'a, D, i64>,
    /// The cache into which the keys are written.
    pub cache: IndexCacheMut<'a, D>,
    /// The gates of the tokens, `[T, 1, D]`, and the table of a pool's positions that is added to
    /// them, `[1, K, D]`. Each is of any dtype. They must be present if keys are pooled, and absent
    /// otherwise.
    pub pool: Option<[TensorRef<'a, D>; 2]>,
}

impl<'a, D: Device> IndexKeys<'a, D> {
    /// Keys that need no rotation, for these slots of `cache`.
    pub const fn new(
        keys: TensorRef<'a, D>,
        norm: [TensorRef<'a, D>; 2],
        slots: ArrayRef<'a, D, i64>,
        cache: IndexCacheMut<'a, D>,
    ) -> Self {
        Self {
            keys,
            norm,
            slots,
            cache,
            rotary: None,
            pool: None,
        }
    }

    options! {
        with_rotary(rotary: Rotary<'a, D>);
        with_pool(pool: [TensorRef<'a, D>; 2]);
    }
}

/// Index queries, and the destination of the quantised queries.
#[non_exhaustive]
pub struct IndexQueries<'a, D: Device> {
    /// `[T, heads, D]`: W_qb · q_latent, not rotated.
    pub queries: TensorRef<'a, D>,
    /// `[T, 1, heads]`, W_w · x, of any dtype.
    pub weights: TensorRef<'a, D>,
    /// The rotation of the first R values, if the model has one.
    pub rotary: Option<Rotary<'a, D>>,
    /// The destination of the queries: `[T, heads, D]` e4m3 without gaps.
    pub quantised: D::BytesMut<'a>,
    /// The destination of the weights: f32 `[T, 1, heads]` without gaps. Each is the head's weight,
    /// times heads^-½ · D^-½ and the scale of its query.
    pub scaled_weights: TensorMut<'a, D>,
}

impl<'a, D: Device> IndexQueries<'a, D> {
    /// Queries that need no rotation and the weights of their heads, with the destinations of both.
    pub const fn new(
        [queries, weights]: [TensorRef<'a, D>; 2],
        quantised: D::BytesMut<'a>,
        scaled_weights: TensorMut<'a, D>,
    ) -> Self {
        Self {
            queries,
            weights,
            rotary: None,
            quantised,
            scaled_weights,
        }
    }

    options! {
        with_rotary(rotary: Rotary<'a, D>);
    }
}

/// The query tokens of a selection. They are some of a batch's tokens.
#[non_exhaustive]
pub struct IndexRows<'a, D: Device> {
    /// The requests. Their lengths determine what each token sees: of a request with `len` tokens
    /// and n query tokens, token i sees the positions `0 .. len − n + i + 1`. If that is below 1,
    /// it sees nothing.
    pub batch: DecodeBatch<'a, D>,
    /// The range of the batch's query tokens.
    pub tokens: Range<usize>,
    /// K: the number of tokens that share an index key and a column of the logits.
    pub pool: u32,
    in_turn: bool,
}

impl<'a, D: Device> IndexRows<'a, D> {
    /// These tokens of `batch`. Each operation begins after the previous one.
    pub const fn new(batch: DecodeBatch<'a, D>, tokens: Range<usize>) -> Self {
        Self {
            batch,
            tokens,
            pool: 1,
            in_turn: false,
        }
    }

    setters! {
        with_pool(pool: u32);
    }

    /// The same rows, for operations that may begin before the previous one has ended.
    ///
    /// # Safety
    ///
    /// If `in_turn` is true, the three operations that make these rows' lists (queries, logits,
    /// selection) follow each other directly. When the first of them is enqueued, no unfinished
    /// work writes the batch's starts, lengths or block tables.
    #[must_use]
    pub const unsafe fn with_in_turn(mut self, in_turn: bool) -> Self {
        self.in_turn = in_turn;
        self
    }

    /// Returns true if each operation may begin before the previous one has ended.
    pub const fn in_turn(&self) -> bool {
        self.in_turn
    }
}

/// A device that can select the tokens that sparse attention attends to.
///
/// Every operation is enqueued, like those of [`Device`].
pub trait IndexDevice: Device {
    /// True if it takes [pooled](IndexerConfig::pool) keys. Otherwise they are refused.
    const POOLS_KEYS: bool = false;

    /// Normalises, rotates and quantises index keys, and writes each to its slot. A slot of −1 is
    /// skipped. Pooled keys go to the tail of their page. A key that completes a pool also makes
    /// the pool's key, from keys of this call and of the tail.
    ///
    /// # Errors
    ///
    /// If shapes disagree with each other or with the cache.
    fn write_index_keys(&self, config: &IndexerConfig, keys: IndexKeys<'_, Self>) -> Result<()>;

    /// Writes the new tokens' rows and index keys to both caches of a layer, in one launch if the
    /// device can. Also rotates `query` if the rows have a rotation, and quantises `queries` if
    /// there are any. The work is that of [`CacheRows::write`],
    /// [`write_index_keys`](Self::write_index_keys) and
    /// [`quantise_index_queries`](Self::quantise_index_queries).
    ///
    /// # Errors
    ///
    /// If shapes or dtypes disagree with each other or with a cache, if the rotated width is odd,
    /// or if the device fails.
    fn write_cache_and_index_keys(
        &self,
        config: &IndexerConfig,
        rows: CacheRows<'_, Self>,
        query: Option<(TensorRef<'_, Self>, TensorMut<'_, Self>)>,
        keys: IndexKeys<'_, Self>,
        queries: Option<IndexQueries<'_, Self>>,
    ) -> Result<()> {
        rows.write(self, query)?;
        self.write_index_keys(config, keys)?;
        match queries {
            Some(queries) => self.quantise_index_queries(config, queries),
            None => Ok(()),
        }
    }

    /// Rotates and quantises index queries, and multiplies the heads' weights by the scales of the
    /// queries.
    ///
    /// # Errors
    ///
    /// If shapes disagree.
    fn quantise_index_queries(
        &self,
        config: &IndexerConfig,
        queries: IndexQueries<'_, Self>,
    ) -> Result<()>;

    /// Scores the positions that each token sees, from quantised `queries` and the `weights` of
    /// their heads, as [`IndexQueries`] describes them. `logits` is f32 `[1, T, columns]` with
    /// adjacent columns. There is one column for each position of the token's request, or for each
    /// pool of K tokens that the token sees completely. Other columns stay unchanged.
    ///
    /// # Errors
    ///
    /// If shapes disagree, or the batch's `max_seq_len` exceeds the columns. A device that reads
    /// the lengths and the block table on the host also refuses a longer request, and a page that
    /// the cache does not have. On others a row ends at the last column, and the logits of such a
    /// page are 0.
    fn index_logits(
        &self,
        config: &IndexerConfig,
        queries: Self::Bytes<'_>,
        weights: TensorRef<'_, Self>,
        cache: &IndexCacheMut<'_, Self>,
        rows: &IndexRows<'_, Self>,
        logits: TensorMut<'_, Self>,
    ) -> Result<()>;

    /// Writes the slots of the largest logits of each row, in pages of `page_size` tokens. `slots`
    /// is `[T, width]` i32, row-major without gaps. The slots are in ascending order of position,
    /// followed by −1. The choice is exact; among equal logits the lower position is chosen first.
    /// Columns that a token does not see may hold anything.
    ///
    /// With pools of K tokens, a list first has the K tokens of each chosen pool, followed by −1 up
    /// to column `width - K + 1`. From there on it has the tokens of the last, incomplete pool,
    /// followed by −1.
    ///
    /// # Errors
    ///
    /// If shapes disagree, or the batch's `max_seq_len` exceeds the columns. A device that reads
    /// the lengths and the block table on the host also refuses a longer request, and a slot that
    /// does not fit 32 bits. On others a row ends at the last column, and such a slot is −1.
    fn select_slots(
        &self,
        logits: TensorRef<'_, Self>,
        rows: &IndexRows<'_, Self>,
        page_size: usize,
        slots: Self::BytesMut<'_>,
        width: usize,
    ) -> Result<()>;
}

impl<D: IndexDevice> IndexKeys<'_, D> {
    /// Checks the call, and returns the number of tokens.
    ///
    /// # Errors
    ///
    /// If a shape, a dtype, or the cache disagrees with the configuration.
    pub fn check(&self, config: &IndexerConfig) -> Result<usize> {
        config.check()?;
        let width = config.width as usize;
        let tokens = self.keys.shape()[0];
        let dtype = self.keys.dtype();
        self.keys
            .layout()
            .require("index keys", dtype, [tokens, 1, width])?;
        for (field, tensor) in ["index norm weight", "index norm bias"]
            .into_iter()
            .zip(&self.norm)
        {
            let layout = tensor.layout();
            layout.require(field, layout.dtype, [1, 1, width])?;
        }
        check_len("slots", self.slots.len(), tokens, "one per token")?;
        let (layout, tail) = (self.cache.layout(), config.tail as usize);
        if layout.width != width {
            let given = format!("keys of {} values", layout.width);
            let accepted = format!("{width}, as index_head_dim says");
            return Err(Error::argument("index cache", given, accepted));
        }
        if layout.tail != tail {
            let given = format!("tails of {}", layout.tail);
            let accepted = format!("{tail}, as the indexer has them");
            return Err(Error::argument("index cache", given, accepted));
        }
        check_pools::<D>(config.pool)?;
        check_gates(config, self.pool.as_ref(), tokens)?;
        check_rotary(config, self.rotary.as_ref(), tokens)?;
        Ok(tokens)
    }
}

impl<D: IndexDevice> IndexQueries<'_, D> {
    /// Checks the call, and returns the number of tokens.
    ///
    /// # Errors
    ///
    /// If a shape or a dtype disagrees with the configuration, or if a destination is too small.
    pub fn check(&self, config: &IndexerConfig) -> Result<usize> {
        config.check()?;
        check_pools::<D>(config.pool)?;
        let [heads, width] = [config.heads, config.width].map(|n| n as usize);
        let tokens = self.queries.shape()[0];
        let expect = |field, tensor: &TensorRef<'_, D>, shape| {
            tensor.layout().require(field, tensor.dtype(), shape)
        };
        expect("index queries", &self.queries, [tokens, heads, width])?;
        expect("index head weights", &self.weights, [tokens, 1, heads])?;
        check_queries(
            "quantised index queries",
            D::byte_len_mut(&self.quantised),
            &self.scaled_weights.as_ref(),
            [tokens, heads, width],
        )?;
        check_rotary(config, self.rotary.as_ref(), tokens)?;
        Ok(tokens)
    }
}

fn check_queries<D: Device>(
    field: &'static str,
    bytes: usize,
    weights: &TensorRef<'_, D>,
    [tokens, heads, width]: [usize; 3],
) -> Result<()> {
    // The product may saturate, but no memory has that number of bytes.
    let needed = tokens.saturating_mul(heads).saturating_mul(width);
    if bytes < needed {
        let accepted = format!("{needed}, for [{tokens}, {heads}, {width}] e4m3");
        return Err(Error::argument(field, format!("{bytes} bytes"), accepted));
    }
    let layout = weights.layout();
    layout.require("scaled head weights", DType::F32, [tokens, 1, heads])?;
    if !layout.has_unit_columns() || (tokens > 1 && layout.strides[0] != heads) {
        let accepted = "rows without gaps";
        return Err(Error::argument("scaled head weights", layout, accepted));
    }
    Ok(())
}

fn check_rotary<D: Device>(
    config: &IndexerConfig,
    rotary: Option<&Rotary<'_, D>>,
    tokens: usize,
) -> Result<()> {
    let Some(rotary) = rotary else {
        return Ok(());
    };
    if rotary.style != config.rotary {
        return Err(Error::argument(
            "index rotary style",
            format!("{:?}", rotary.style),
            format!("{:?}, as the indexer's configuration has it", config.rotary),
        ));
    }
    rotary.check(tokens, config.rope as usize)
}

/// Refuses gates and a table that do not fit the indexer's pools. Also refuses their absence if
/// keys are pooled.
pub(super) fn check_gates<D: Device>(
    config: &IndexerConfig,
    given: Option<&[TensorRef<'_, D>; 2]>,
    tokens: usize,
) -> Result<()> {
    let [width, pool] = [config.width, config.pool].map(|n| n as usize);
    match (given, pool) {
        (None, 1) => Ok(()),
        (Some([gates, table]), pool) if pool > 1 => {
            let (of_gates, of_table) = (gates.layout(), table.layout());
            of_gates.require("index gates", of_gates.dtype, [tokens, 1, width])?;
            of_table.require("index pool table", of_table.dtype, [1, pool, width])
        }
        (given, pool) => {
            let given = if given.is_some() { "present" } else { "absent" };
            let accepted = format!("present with pools alone: index_kpool is {pool}");
            Err(Error::argument("index gates", given, accepted))
        }
    }
}

/// Refuses pooled keys on a device that does not support them.
pub(super) fn check_pools<D: IndexDevice>(pool: u32) -> Result<()> {
    match pool {
        1 => Ok(()),
        pool if D::POOLS_KEYS && pool > 1 => Ok(()),
        pool => Err(Error::argument(
            "index_kpool",
            pool,
            "1: the device pools no index keys",
        )),
    }
}

impl<D: IndexDevice> IndexRows<'_, D> {
    /// Checks that the logits fit these rows, and returns the number of columns.
    ///
    /// # Errors
    ///
    /// If the shape or dtype differs, if columns have gaps, or if there are fewer columns than the
    /// batch may see. Also if the batch's arrays do not have the lengths that its block table
    /// needs, or if there are rows but no request.
    pub fn check(&self, logits: &TensorRef<'_, D>) -> Result<usize> {
        self.batch.check_lens()?;
        check_pools::<D>(self.pool)?;
        if self.batch.block_table.requests() == 0 && !self.tokens.is_empty() {
            let given = format!("none, for {} query tokens", self.tokens.len());
            return Err(Error::argument("requests", given, "1 and up"));
        }
        let columns = logits.shape()[2];
        let layout = logits.layout();
        layout.require("index logits", DType::F32, [1, self.tokens.len(), columns])?;
        if !layout.has_unit_columns() {
            return Err(Error::argument("index logits", layout, "unit columns"));
        }
        let longest = self.batch.max_seq_len / self.pool as usize;
        if longest > columns {
            let given = format!("{columns} columns");
            let accepted = format!("at least the batch's longest length, {longest}");
            return Err(Error::argument("index logits", given, accepted));
        }
        Ok(columns)
    }

    /// Checks that quantised queries fit these rows.
    ///
    /// # Errors
    ///
    /// If there are too few bytes, or if the weights have another shape, dtype or strides.
    pub fn check_queries(
        &self,
        config: &IndexerConfig,
        bytes: usize,
        weights: &TensorRef<'_, D>,
    ) -> Result<()> {
        let [heads, width] = [config.heads, config.width].map(|n| n as usize);
        // Without heads, the width may be anything.
        if heads == 0 {
            return Err(Error::argument("index_n_heads", 0, "1 and up"));
        }
        let shape = [self.tokens.len(), heads, width];
        check_queries("index queries", bytes, weights, shape)
    }

    /// Checks that lists of `width` slots fit these rows, and returns the bytes that they take.
    ///
    /// # Errors
    ///
    /// If the width is 0 or does not fit whole pools, if there are too few bytes for the lists, or
    /// if the device does not support such pools.
    pub fn check_lists(&self, bytes: usize, width: usize) -> Result<usize> {
        check_pools::<D>(self.pool)?;
        let (tokens, pool) = (self.tokens.len(), self.pool as usize);
        tokens
            .checked_mul(width)
            .and_then(|slots| slots.checked_mul(size_of::<i32>()))
            .filter(|&needed| width > 0 && needed <= bytes)
            .filter(|_| width % pool == pool - 1)
            .ok_or_else(|| {
                Error::argument(
                    "slot lists",
                    format!("{bytes} bytes in lists of {width}"),
                    match pool {
                        1 => format!("lists of 1 and up, for each of {tokens} tokens"),
                        pool => format!(
                            "lists of a multiple of {pool} and {}, for each of {tokens} tokens",
                            pool - 1
                        ),
                    },
                )
            })
    }
}
