//! The layers of a model that have an indexer, and those that use the list of an earlier one.

use std::fmt;

/// The max number of layers whose sharing can be described.
pub(crate) const MAX_LAYERS: u32 = 256;

/// The list of slots that a layer attends to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LayerLists {
    /// Its own: it has an indexer.
    Own,
    /// The list of the last layer before it that has an indexer.
    Shared,
    /// None: it attends to all tokens.
    None,
}

/// The layers that share the list of the last layer before them that has an indexer. Such a layer
/// has neither weights of an indexer nor an index cache. A layer that is not described has an
/// indexer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct IndexLayers {
    /// Bit i of word i / 64: layer i shares.
    shared: [u64; (MAX_LAYERS / 64) as usize],
    /// Bit i of word i / 64: layer i has no list.
    dense: [u64; (MAX_LAYERS / 64) as usize],
}

impl IndexLayers {
    /// Every layer has an indexer.
    pub(crate) const ALL: Self = Self {
        shared: [0; 4],
        dense: [0; 4],
    };

    /// The layers of a model, given the list of each, from layer 0 on; those behind the last have
    /// an indexer.
    ///
    /// `None` if a layer shares and none before it has an indexer, or a layer that has none is
    /// behind the first [`MAX_LAYERS`].
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

    /// True if a layer has no list: it attends to all tokens.
    pub(crate) const fn is_dense(&self, layer: u32) -> bool {
        layer < MAX_LAYERS && self.dense[(layer / 64) as usize] >> (layer % 64) & 1 == 1
    }

    /// The number of layers without a list among the first `layers`.
    pub(crate) fn dense(&self, layers: u32) -> u32 {
        let dense = (0..layers.min(MAX_LAYERS)).map(|layer| u32::from(self.is_dense(layer)));
        dense.sum()
    }

    /// The layer whose list a layer uses: itself, if it has an indexer or no list.
    pub(crate) const fn source(&self, layer: u32) -> u32 {
        let mut source = layer;
        // A layer before one that shares has an indexer.
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
        // The layer of multi-token prediction has its own.
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
