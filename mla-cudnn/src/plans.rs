//! A cache of plans.

use std::collections::HashMap;
use std::hash::Hash;

/// Plans by their keys. A captured plan stays for the life of this list, since a graph may launch
/// its kernels. Of the others, the most recently used ones stay.
pub(crate) struct Plans<K, P> {
    known: HashMap<K, Known<P>>,
    max: usize,
    /// Counts uses, to compare the times of two uses.
    uses: u64,
}

struct Known<P> {
    /// The plan, or `None` if cuDNN has and will have none for the key.
    plan: Option<P>,
    last_use: u64,
    is_captured: bool,
}

impl<K: Copy + Eq + Hash, P: Copy> Plans<K, P> {
    /// Makes an empty cache of at most `max` plans, not counting those of graphs.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            known: HashMap::new(),
            max,
            uses: 0,
        }
    }

    /// Looks up a key, which counts as a use. Returns its plan, `Some(None)` if it is known to have
    /// none, or `None` if the key is unknown.
    pub(crate) fn get(&mut self, key: &K) -> Option<Option<P>> {
        let known = self.known.get_mut(key)?;
        self.uses += 1;
        known.last_use = self.uses;
        Some(known.plan)
    }

    /// Returns the plan of a key for a launch.
    pub(crate) fn launch(&mut self, key: &K, is_capturing: bool) -> Option<P> {
        let known = self.known.get_mut(key)?;
        known.is_captured |= is_capturing;
        known.plan
    }

    /// Adds a plan, or the fact that the key has none.
    pub(crate) fn add(&mut self, key: K, plan: Option<P>) {
        self.uses += 1;
        let known = Known {
            plan,
            last_use: self.uses,
            is_captured: false,
        };
        self.known.insert(key, known);
    }

    /// Evicts the least recently used keys until there is room for one more, and returns their
    /// plans. No graph uses these plans, but their launches may still run.
    pub(crate) fn make_room(&mut self) -> Vec<P> {
        let mut free: Vec<_> = self
            .known
            .iter()
            .filter(|(_, known)| !known.is_captured)
            .map(|(key, known)| (known.last_use, *key))
            .collect();
        let surplus = (free.len() + 1).saturating_sub(self.max);
        free.sort_unstable_by_key(|(last_use, _)| *last_use);
        let gone = free.into_iter().take(surplus);
        gone.filter_map(|(_, key)| self.known.remove(&key)?.plan)
            .collect()
    }

    /// Returns all plans, captured or not.
    pub(crate) fn all(&self) -> impl Iterator<Item = P> {
        self.known.values().filter_map(|known| known.plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the keys that are evicted while `keys` are looked up and launched one after another.
    fn gone(max: usize, keys: &[u32], captured: &[u32]) -> Vec<u32> {
        let mut plans = Plans::new(max);
        let mut gone = Vec::new();
        for key in keys {
            if plans.get(key).is_none() {
                gone.extend(plans.make_room());
                plans.add(*key, Some(*key));
            }
            assert_eq!(plans.launch(key, captured.contains(key)), Some(*key));
        }
        gone
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        assert!(gone(3, &[1, 2, 3, 1, 2, 3], &[]).is_empty());
        assert_eq!(gone(3, &[1, 2, 3, 4], &[]), [1]);
        assert_eq!(gone(3, &[1, 2, 3, 1, 4, 5], &[]), [2, 3]);
        // If a key occurs again after its plan was evicted, the plan is built again.
        assert_eq!(gone(2, &[1, 2, 3, 1], &[]), [1, 2]);
    }

    #[test]
    fn plans_of_a_graph_stay_and_take_no_place_of_others() {
        assert_eq!(gone(2, &[1, 2, 3, 4, 5], &[1, 2]), [3]);
        let all: Vec<u32> = (0..100).collect();
        assert!(gone(2, &all, &all).is_empty());
        let mut plans = Plans::new(1);
        plans.add(7, Some(70));
        plans.launch(&7, true);
        plans.launch(&7, false);
        assert!(plans.make_room().is_empty(), "captured once is enough");
        assert_eq!(plans.all().collect::<Vec<_>>(), [70]);
    }

    #[test]
    fn a_key_without_a_plan_is_known_and_takes_room() {
        let mut plans = Plans::new(2);
        plans.add(1, None::<u32>);
        assert_eq!((plans.get(&1), plans.get(&2)), (Some(None), None));
        plans.add(2, Some(20));
        // The evicted key has no plan to free.
        assert!(plans.make_room().is_empty());
        assert_eq!((plans.get(&1), plans.get(&2)), (None, Some(Some(20))));
        plans.add(3, Some(30));
        assert_eq!(plans.make_room(), [20]);
    }
}
