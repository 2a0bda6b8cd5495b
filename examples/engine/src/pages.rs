//! The page allocator. It knows the free pages, the references to the others, and the prefixes that
//! pages hold.
//!
//! A full page may be registered under its prefix: its tokens, and all tokens before them. A later
//! request with the same prefix refers to the page instead of computing it again. A page without
//! references keeps its prefix until its memory is needed. The page that has been unused for the
//! longest time is the first to be reused. If a request writes to a page that others may read, it
//! gets a copy.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// The content of a registered page: its tokens, and the hash of the prefix before them.
#[derive(PartialEq, Eq, Hash, Clone)]
struct Prefix {
    before: u64,
    tokens: Vec<u32>,
}

impl Prefix {
    fn hash_of(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// All pages of the cache.
pub struct Pages {
    page_size: usize,
    /// The number of requests that refer to each page.
    holders: Vec<u32>,
    free: Vec<i32>,
    /// Registered pages without references. The page that has been unused for the longest time
    /// comes first.
    idle: VecDeque<i32>,
    by_prefix: HashMap<Prefix, i32>,
    /// The prefix under which each page is registered.
    registered: Vec<Option<Prefix>>,
    peak_used: usize,
}

impl Pages {
    /// Makes an allocator of `count` free pages of `page_size` tokens.
    pub fn new(count: usize, page_size: usize) -> Self {
        Self {
            page_size,
            holders: vec![0; count],
            free: (0..count as i32).rev().collect(),
            idle: VecDeque::new(),
            by_prefix: HashMap::new(),
            registered: vec![None; count],
            peak_used: 0,
        }
    }

    /// Returns the number of tokens in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the number of all pages.
    pub fn count(&self) -> usize {
        self.holders.len()
    }

    /// Returns the number of pages that a request can still get.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Returns the number of pages that requests refer to.
    pub fn used(&self) -> usize {
        self.count() - self.available()
    }

    /// Returns the maximum number of pages that were in use at once.
    pub fn peak_used(&self) -> usize {
        self.peak_used
    }

    /// Allocates a page for one request, if one is available.
    pub fn allocate(&mut self) -> Option<i32> {
        let page = self.free.pop().or_else(|| {
            let page = self.idle.pop_front()?;
            if let Some(prefix) = self.registered[page as usize].take() {
                self.by_prefix.remove(&prefix);
            }
            Some(page)
        })?;
        self.hold(page);
        Some(page)
    }

    /// Returns the pages of the longest registered beginning of `tokens`. Each gets one more
    /// reference.
    pub fn share(&mut self, tokens: &[u32]) -> Vec<i32> {
        let mut pages = Vec::new();
        let mut before = 0;
        for tokens in tokens.chunks_exact(self.page_size) {
            let prefix = Prefix {
                before,
                tokens: tokens.to_vec(),
            };
            let Some(&page) = self.by_prefix.get(&prefix) else {
                break;
            };
            before = prefix.hash_of();
            if self.holders[page as usize] == 0 {
                self.idle.retain(|idle| *idle != page);
            }
            self.hold(page);
            pages.push(page);
        }
        pages
    }

    /// Registers the first `pages` under the tokens that fill them. A page is not registered if
    /// another one already holds its tokens.
    pub fn register(&mut self, tokens: &[u32], pages: &[i32]) {
        let mut before = 0;
        for (tokens, &page) in tokens.chunks_exact(self.page_size).zip(pages) {
            let prefix = Prefix {
                before,
                tokens: tokens.to_vec(),
            };
            before = prefix.hash_of();
            let known = self.by_prefix.contains_key(&prefix);
            if !known && self.registered[page as usize].is_none() {
                self.registered[page as usize] = Some(prefix.clone());
                self.by_prefix.insert(prefix, page);
            }
        }
    }

    /// True if the page's only holder may write to it: no other request refers to it or can find it
    /// by its prefix.
    pub fn is_private(&self, page: i32) -> bool {
        self.holders[page as usize] == 1 && self.registered[page as usize].is_none()
    }

    /// Releases a reference.
    pub fn release(&mut self, page: i32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        match self.registered[page as usize] {
            Some(_) => self.idle.push_back(page),
            None => self.free.push(page),
        }
    }

    fn hold(&mut self, page: i32) {
        self.holders[page as usize] += 1;
        self.peak_used = self.peak_used.max(self.used());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_shared_as_far_as_it_reaches() {
        let mut pages = Pages::new(4, 2);
        let own: Vec<i32> = (0..3).map(|_| pages.allocate().unwrap()).collect();
        pages.register(&[1, 2, 3, 4, 5], &own);
        assert_eq!(pages.share(&[1, 2, 3, 4, 9, 9]), own[..2]);
        assert_eq!(pages.share(&[1, 2, 4, 3]), own[..1]);
        // The same tokens after another beginning are in another page.
        assert!(pages.share(&[3, 4]).is_empty());
        assert_eq!((pages.used(), pages.available()), (3, 1));
        assert!(!pages.is_private(own[0]) && pages.is_private(own[2]));
    }

    #[test]
    fn idle_prefixes_give_way_to_new_pages() {
        let mut pages = Pages::new(2, 1);
        let own = [pages.allocate().unwrap(), pages.allocate().unwrap()];
        pages.register(&[7, 8], &own);
        for page in own {
            pages.release(page);
        }
        assert_eq!((pages.used(), pages.available()), (0, 2));
        assert_eq!(pages.share(&[7, 8]), own);
        for page in own {
            pages.release(page);
        }
        // The page that was released first is reused first.
        assert_eq!(pages.allocate(), Some(own[0]));
        assert!(pages.share(&[7, 8]).is_empty());
        assert_eq!(pages.allocate(), Some(own[1]));
        assert_eq!(pages.allocate(), None);
        assert_eq!(pages.peak_used(), 2);
    }
}
