//! The arguments of subcommands that run a batch of random data.

use clap::Args;
use mla_runtime::model::{DType, KvFormat};

use crate::args::{kv_format, natural};
use crate::device::DeviceName;

/// A batch of random data, with its device and its cache.
#[derive(Args)]
pub struct BatchArgs {
    /// The requests, in the form of `mla spec`: `2q512_8q1s4k` is 2 prefills of 512 tokens and 8
    /// decodes at 4096.
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true)]
    pub batch: String,
    /// Device to run on.
    #[arg(long, default_value = "cpu")]
    pub device: DeviceName,
    /// The format of the cache [default: the dtype].
    #[arg(long, value_parser = kv_format())]
    kv: Option<KvFormat>,
    /// Seed of the random numbers.
    #[arg(long, value_name = "N", default_value = "1", value_parser = natural)]
    pub seed: u32,
}

impl BatchArgs {
    /// Returns the cache's format, for queries of `dtype`.
    pub fn kv_format(&self, dtype: DType) -> KvFormat {
        self.kv.unwrap_or(KvFormat::of(dtype))
    }
}
