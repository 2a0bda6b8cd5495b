//! The layers of a model that have an indexer, and the layers that use the list of an earlier
//! layer.

use std::fmt;

/// The maximum number of layers for which sharing can be described.
pub(crate) const MAX_LAYERS: u32 = 256;

/// The list of slots that a layer attends to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LayerLists {
    /// Its own list: the layer has an indexer.
    Own,
    /// The list of the nearest earlier layer that has an indexer.
    Shared,
    /// No list: the layer attends to all tokens.
    None,
}

/// The layers that share the list of the nearest earlier layer with an indexer. Such a layer has
/// neither indexer weights nor an index cache. A layer that is not described has an indexer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct IndexLayers {
    /// Bit i mod 64 of word i / 64 is 1 if layer i shares a list.
    shared: [u64; (MAX_LAYERS / 64) as usize],
    /// Bit i mod 64 of word i / 64 is 1 if layer i has no list.
    dense: [u64; (MAX_LAYERS / 64) as usize],
}

impl IndexLayers {
    /// Every layer has an indexer.
    pub(crate) const ALL: Self = Self {
        shared: [0; 4],
        dense: [0; 4],
    };

    /// The layers of a model from the list of each, beginning with layer 0. Layers after the last
    /// one given have an indexer.
    ///
    /// Returns `None` if a layer shares a list but no earlier layer has an indexer. Also returns
    /// `None` if a layer without an indexer is beyond the first [`MAX_LAYERS`].
    pub(crate) fn from_lists(lists: impl IntoIterator<Item = LayerLists>) -> Option<Self> {
        let mut layers = Self::ALL;
        let mut has_source = false;
        for (index, list) in lists.into_iter().enumerate() {
            let words = match list {
                LayerLists::Own => {
                    has_source = true;
                    continue;
                }
                LayerLists::Shared if !has_source => return None,
                LayerLists::Shared => &mut layers.shared,
                LayerLists::None => &mut layers.dense,
            };
            *words.get_mut(index / 64)? |= 1 << (index % 64);
        }
        Some(layers)
    }

    /// Returns true if a layer has an indexer of its own.
    pub(crate) const fn has_indexer(&self, layer: u32) -> bool {
        layer >= MAX_LAYERS
            || (self.shared[(layer / 64) as usize] | self.dense[(layer / 64) as usize])
                >> (layer % 64)
                & 1
                == 0
    }

    /// Returns true if a layer has no list, so that it attends to all tokens.
    pub(crate) const fn is_dense(&self, layer: u32) -> bool {
        layer < MAX_LAYERS && self.dense[(layer / 64) as usize] >> (layer % 64) & 1 == 1
    }

    /// The number of layers without a list among the first `layers`.
    pub(crate) fn dense(&self, layers: u32) -> u32 {
        let dense = (0..layers.min(MAX_LAYERS)).map(|layer| u32::from(self.is_dense(layer)));
        dense.sum()
    }

    /// The layer whose list a layer uses. It is the layer itself if that has an indexer or no list.
    pub(crate) const fn source(&self, layer: u32) -> u32 {
        let mut source = layer;
        // A layer that shares always has an earlier layer with an indexer.
        while !self.has_indexer(source) && !self.is_dense(layer) {
            source -= 1;
        }
        source
    }

    /// Counts the layers with an indexer among the first `layers`.
    pub(crate) fn indexers(&self, layers: u32) -> u32 {
        let sharing: u32 = (0..layers.min(MAX_LAYERS))
            .map(|layer| u32::from(!self.has_indexer(layer)))
            .sum();
        layers - sharing
    }
}

impl fmt::Debug for IndexLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |is: &dyn Fn(u32) -> bool| {
            let layers = (0..MAX_LAYERS).filter(|layer| is(*layer));
            layers.collect::<Vec<u32>>()
        };
        let shared = of(&|layer| !self.has_indexer(layer) && !self.is_dense(layer));
        let dense = of(&|layer| self.is_dense(layer));
        match dense.is_empty() {
            true => write!(f, "IndexLayers {{ shared: {shared:?} }}"),
            false => write!(f, "IndexLayers {{ shared: {shared:?}, dense: {dense:?} }}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glm_5_2_has_21_indexers() {
        let list = |layer| match layer < 2 || layer % 4 == 2 {
            true => LayerLists::Own,
            false => LayerLists::Shared,
        };
        let layers = IndexLayers::from_lists((0..78).map(list)).unwrap();
        let own: Vec<u32> = (0..78).filter(|layer| layers.has_indexer(*layer)).collect();
        let expected: Vec<u32> = [0, 1].into_iter().chain((2..78).step_by(4)).collect();
        assert_eq!(own, expected);
        assert_eq!((own.len(), layers.indexers(78)), (21, 21));
        assert_eq!(
            [2, 3, 5, 6, 77].map(|layer| layers.source(layer)),
            [2, 2, 2, 6, 74]
        );
        // The layer for multi-token prediction has its own indexer.
        assert!(layers.has_indexer(78));
        assert_eq!(IndexLayers::ALL.indexers(300), 300);
        assert_eq!(IndexLayers::ALL.source(299), 299);
    }

    #[test]
    fn some_layers_may_have_no_list() {
        use LayerLists::{None as Dense, Own, Shared};
        let layers = IndexLayers::from_lists([Dense, Own, Dense, Shared, Own]).unwrap();
        assert_eq!((layers.indexers(5), layers.dense(5)), (2, 2));
        assert_eq!(
            (0..5).map(|it| layers.source(it)).collect::<Vec<_>>(),
            [0, 1, 2, 1, 4]
        );
        assert_eq!(
            format!("{layers:?}"),
            "IndexLayers { shared: [3], dense: [0, 2] }"
        );
        assert_eq!(IndexLayers::from_lists([Dense, Shared]), None);
        assert_eq!(IndexLayers::from_lists([Dense; 257]), None);
        assert_eq!(IndexLayers::from_lists([Own; 257]), Some(IndexLayers::ALL));
    }

    #[test]
    fn what_cannot_be_described() {
        assert_eq!(IndexLayers::from_lists([LayerLists::Shared]), None);
        assert_eq!(IndexLayers::from_lists([]), Some(IndexLayers::ALL));
    }
}
