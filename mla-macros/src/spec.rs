//! The backend's properties from the arguments. They match the runtime's `BackendSpec`, with all
//! defaults filled in.

use syn::Path;

use crate::capability::Capabilities;
use crate::dims::{Heads, PageSizes};
use crate::place::Phase;
use crate::priority::Priority;
use crate::vocabulary::Name;

/// The fields that the expansion writes. Only the platform is missing, because the device gives it.
pub(crate) struct Spec {
    pub(crate) name: String,
    /// `None` means the name of the package. The compiler knows it.
    pub(crate) provider: Option<String>,
    pub(crate) phase: Phase,
    /// `None` means the targets that the kernels are compiled for.
    pub(crate) sm: Option<Vec<Capabilities>>,
    /// The constants with the targets of each family; empty if the key is not given.
    pub(crate) compiled: Vec<Path>,
    /// The Cargo features. Any of them compiles the backend. Empty if it is always compiled.
    pub(crate) features_of_cargo: Vec<String>,
    /// The table of the GPUs on which its tests passed.
    pub(crate) run_on: Option<Path>,
    pub(crate) dtypes: Vec<Name>,
    pub(crate) dims: Option<Vec<[u32; 3]>>,
    pub(crate) cache_dims: Option<Vec<[u32; 2]>>,
    pub(crate) heads: Heads,
    pub(crate) kv: Vec<Name>,
    pub(crate) page_sizes: PageSizes,
    pub(crate) query_len: Name,
    /// `None` means any number.
    pub(crate) max_query_len: Option<u32>,
    pub(crate) query_format: Name,
    pub(crate) key_layout: Name,
    pub(crate) alignment: u32,
    pub(crate) graphs: Name,
    pub(crate) plans_on_host: bool,
    pub(crate) dependent_launch: bool,
    pub(crate) lse: Name,
    pub(crate) lse_precision: Name,
    pub(crate) quant_output: bool,
    pub(crate) sparse: Name,
    /// `None` means any number.
    pub(crate) max_list_width: Option<u32>,
    pub(crate) features: Vec<Name>,
    pub(crate) priority: Priority,
}
