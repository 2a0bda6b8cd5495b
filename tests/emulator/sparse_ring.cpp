// Tests the ring of sparse decode on the host. The loading warps' own code (producer.cuh,
// list_walk.cuh) fills the ring. Other threads empty it; they wait and arrive as scores.cuh and
// output.cuh do. A stage must not be filled before all output threads have released its previous
// use. Every row must be the one that the lists name there. No thread may wait for ever.
#include "ptx/sm90.cuh"
#include "sm90/decode/sparse/barriers.cuh"
#include "sm90/decode/sparse/producer.cuh"

namespace {

using namespace mla::sm90::sparse;
using mla::PipelineCounter;
using mla::PipelineState;
using mla::emulator::Block;
using mla::emulator::Flight;
using mla::emulator::Hopper;
using mla::emulator::Mbarrier;
namespace ptx = mla::ptx;

// The lists of a launch of one CTA: for each token, those of both caches.
struct Lists {
    std::vector<std::vector<int>> of[kSources];
    bool with_counts = false;
    // The pages of dense requests, each of which has one token. The token's list says what its keys
    // are.
    std::vector<std::vector<int>> pages;

    size_t tokens() const { return of[0].size(); }
};

// A list of `keys` valid entries.
std::vector<int> whole(std::minstd_rand& random, int keys) {
    std::vector<int> list(keys);
    for (int& slot : list) slot = random() % 4096;
    return list;
}

// Appends a batch of entries that a warp reads together: `keys` of them are valid, the rest empty.
void append_batch(std::vector<int>& list, std::minstd_rand& random, int keys, int ranks) {
    for (int i = 0; i < Entries::kGroups * kListGroup * ranks; ++i) {
        // This CTA's entries are those of the groups that its rank takes.
        const bool own = i / kListGroup % ranks == 0;
        list.push_back(own && keys-- > 0 ? int(random() % 4096) : -1);
    }
}

enum class Kind { one_list, two_lists, gaps, mixed, dense };

Lists draw(Kind kind, std::minstd_rand& random, int ranks) {
    const auto between = [&](int low, int high) { return low + int(random() % (high - low + 1)); };
    Lists lists;
    const auto add = [&](std::vector<int> first, std::vector<int> second) {
        lists.of[0].push_back(std::move(first));
        lists.of[1].push_back(std::move(second));
    };
    lists.with_counts = kind == Kind::two_lists || random() % 2;
    if (kind == Kind::one_list)
        for (int i = 0; i < 2; ++i) {
            add(whole(random, 64 * between(2, 4) + between(33, 48)), {});
            add(whole(random, between(33, 48)), {});
            add(whole(random, 64 * between(1, 3) + between(1, 48)), {});
        }
    if (kind == Kind::two_lists || kind == Kind::mixed) {
        add(whole(random, 128), whole(random, 256 + between(33, 48)));
        for (int i = 0; i < 3; ++i) {
            add(whole(random, between(1, 48)), whole(random, between(33, 48)));
            add(whole(random, between(33, 48)), whole(random, 64 * between(0, 3) + 40));
        }
    }
    if (kind == Kind::gaps || kind == Kind::mixed) {
        std::vector<int> list;
        for (int part = 0; part < 3; ++part) {
            // The fourth loading warp skips tiles of three slots, even several in a row.
            const int least = random() % 2 ? 33 : 1;
            for (int n = between(2, 12); n > 0; --n) {
                append_batch(list, random, between(least, 48), ranks);
                append_batch(list, random, 0, ranks);
            }
            for (int n = between(1, 3); n > 0; --n) append_batch(list, random, 128, ranks);
        }
        add(std::move(list), {});
    }
    if (kind == Kind::dense)
        for (int i = 0; i < 6; ++i) {
            std::vector<int> list(between(33, 300)), pages((list.size() + 63) / 64);
            for (int& page : pages) page = random() % 64;
            for (size_t key = 0; key < list.size(); ++key)
                list[key] = pages[key / 64] * 64 + int(key % 64);
            // No cache has this page. In 32 bits, its slots would be those of the first page.
            const size_t broken = random() % pages.size();
            pages[broken] = 1 << 26;
            for (size_t key = 64 * broken; key < list.size() && key < 64 * broken + 64; ++key)
                list[key] = -1;
            add(std::move(list), {});
            lists.pages.push_back(std::move(pages));
        }
    return lists;
}

// A run: lists, the caches whose rows they name, and how slow some threads are.
template <class L, class R>
struct Run {
    static constexpr int kGroups = L::kScoreGroups;
    static constexpr int kConsumers = 128 * kGroups + kOutputThreads;
    static constexpr int kThreads = 128 + kConsumers + 1;
    static constexpr int kRows = 4096, kStride = (R::kBytes + 15) / 16 * 16;
    // The last word of a row, behind its latent; it has no rotary key if it ends there.
    static constexpr int kEnd = R::kBytes - R::kLatentBytes - 4;
    // Strides of rotary keys in a tensor of their own, with a gap behind each key and each page.
    static constexpr int kRopeStride = R::kBytes - R::kLatentBytes + 16,
                         kRopePage = 64 * kRopeStride + 48;

    KernelParams p = {};
    std::vector<char> caches[kSources], ropes[kSources];
    std::vector<int> lists[kSources], counts[kSources];
    std::vector<int> block_table, seq_lens, query_starts;
    // Entries that this CTA attends to, token by token, in the format of ListWalk::pending.
    std::vector<std::vector<uint32_t>> expected;
    // Number of rounds that each role pauses before it goes on.
    int load_pause[kLoadWarps] = {}, scores_pause = 0, output_pause = 0;
    unsigned seed;
    // For each stage: number of copies to it that have begun, and number of output threads that
    // have released it.
    std::vector<int> filled = std::vector<int>(L::kStages), freed = std::vector<int>(L::kStages);
    int left = 0;

    Run(const Lists& drawn, unsigned seed_) : seed(seed_) {
        const int ranks = int(Hopper::current().ranks);
        expected.resize(drawn.tokens());
        p.split = R::kSplits && seed % 2;
        p.row_bytes = p.split ? R::kLatentBytes : R::kBytes;
        for (int k = 0; k < kSources; ++k) {
            caches[k].resize(size_t(kRows) * kStride);
            ropes[k].resize(size_t(kRows / 64) * kRopePage);
            for (uint32_t row = 0; row < kRows; ++row) {
                const uint32_t tag = row | uint32_t(k) << 31;
                char* latent = &caches[k][size_t(row) * kStride];
                char* rope = p.split ? &ropes[k][row / 64 * kRopePage + row % 64 * kRopeStride]
                                     : latent + R::kLatentBytes;
                std::memcpy(latent, &tag, 4);
                std::memcpy(rope + kEnd, &tag, 4);
            }
            if (p.split) p.rope[k] = {ropes[k].data(), kRopePage, kRopeStride};
            size_t width = 0;
            for (const auto& list : drawn.of[k]) width = std::max(width, list.size());
            for (size_t token = 0; token < drawn.tokens(); ++token) {
                const auto& list = drawn.of[k][token];
                for (size_t i = 0; i < list.size(); ++i)
                    if (list[i] >= 0 && int(i / kListGroup) % ranks == 0)
                        expected[token].push_back(uint32_t(list[i]) | uint32_t(k) << 31);
                lists[k].insert(lists[k].end(), list.begin(), list.end());
                lists[k].resize((token + 1) * width, -1);
                counts[k].push_back(int(list.size()));
            }
            Source& s = p.sources[k];
            s = {};
            if (width == 0) continue;
            s.lists = lists[k].data();
            s.list_stride = int64_t(width);
            s.counts = drawn.with_counts ? counts[k].data() : nullptr;
            s.width = int(width);
            s.slots = kRows;
            s.cache = caches[k].data();
            s.slot_stride = kStride;
            s.page_size = 64;
            s.pages_adjoin = true;
        }
        if (!drawn.pages.empty()) be_dense(drawn);
        p.items = p.tokens = int(drawn.tokens());
        p.head_tiles = 1;
        p.tile_heads = p.heads = 1;
        p.token_factor = 1u << 31;
        // Queries are only prefetched into L2; any addresses will do.
        p.q_latent = p.q_rope = caches[0].data();
    }

    // Runs a launch of one CTA; returns true if it ended.
    bool go() {
        left = kConsumers + 128;
        Hopper::current().flights.clear();
        Hopper::current().begins = [&](const Flight& f) { begins(f); };
        const std::function<void()> body = [&] { thread(); };
        mla::emulator::Index block, grid;
        grid.x = 1;
        Block cta(kThreads, L::kBytes, seed, block, grid);
        cta.start(body);
        uint64_t seen = 0;
        int idle = 0;
        while (cta.step()) {
            idle = Mbarrier::progress() == seen ? idle + 1 : 0;
            seen = Mbarrier::progress();
            if (idle > 4000) return false;
        }
        return true;
    }

  private:
    // Gives the keys by pages in place of lists.
    void be_dense(const Lists& drawn) {
        constexpr int kPages = 8;
        std::fill(lists[0].begin(), lists[0].end(), -1);
        for (size_t token = 0; token < drawn.tokens(); ++token) {
            block_table.insert(block_table.end(), drawn.pages[token].begin(),
                               drawn.pages[token].end());
            block_table.resize((token + 1) * kPages, -1);
            seq_lens.push_back(int(drawn.of[0][token].size()));
            query_starts.push_back(int(token));
        }
        query_starts.push_back(int(drawn.tokens()));
        p.dense_within = 1 << 20;
        p.requests = int(drawn.tokens());
        p.block_table = block_table.data();
        p.block_table_stride = kPages;
        p.seq_lens = seq_lens.data();
        p.query_starts = query_starts.data();
    }

    static uint32_t ring_base() { return Block::kSharedBase + L::kRingOffset; }

    void begins(const Flight& f) {
        const int stage = int((f.to - ring_base()) / L::kStageBytes);
        const int use = filled[stage]++ / (p.split ? 2 * kStageKeys : kStageKeys);
        if (freed[stage] != use * kOutputThreads)
            Mbarrier::fail("a stage is filled before its use before has been freed");
    }

    static void pause(int rounds) {
        for (int i = 0; i < rounds; ++i) mla::emulator::Block::current()->yield();
    }

    void thread() {
        auto& s =
            *reinterpret_cast<typename L::Control*>(ptx::dynamic_shared() + L::kControlOffset);
        const int own = int(threadIdx.x);
        if (own == 0) initialise<kGroups>(s);
        emulated().sync_threads();
        if (own < 128)
            load(s, own / 32);
        else if (own < 128 + 128 * kGroups)
            scores(s, (own - 128) / 128);
        else if (own < 128 + kConsumers)
            output(s, own - 128 - 128 * kGroups);
        else
            return copies();
        --left;
    }

    // The copy engine.
    void copies() {
        std::minstd_rand random(seed);
        auto& flights = Hopper::current().flights;
        while (left > 0) {
            for (size_t n = flights.size() / 4 + 1; n > 0 && !flights.empty(); --n)
                if (random() % 4 == 0) Hopper::current().land(random() % flights.size());
            emulated().yield();
        }
    }

    void load(typename L::Control& s, int warp) {
        Entries first = {};
        const int lane = ptx::laneid();
        if (L::kShort) first.read_first(p, TileScheduler::first(p), lane);
        Producer<L, R> loader{{p, s, warp, lane, first}, ring_base()};
        loader.walk.run([&](uint32_t taken, int keys) {
            pause(load_pause[warp]);
            loader.copy(taken, keys);
        });
    }

    void scores(typename L::Control& s, int group) {
        PipelineState<L::kStages> ring;
        PipelineCounter<kPublishedTiles> tile;
        PipelineCounter<kProbabilityTiles> scored;
        const int lane = ptx::laneid(), warp = int(threadIdx.x) / 32 % 4;
        const auto release_tile = [&] {
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[tile.stage()]));
            ++tile.count;
        };
        const auto adopt_maxima = [&](uint32_t use) {
            const PipelineCounter<kProbabilityTiles> before{use};
            if (kGroups == 2)
                ptx::mbarrier_wait(ptx::shared_address(&s.maxima_published[before.stage()]),
                                   before.phase());
        };
        for (uint32_t item = 0; item < uint32_t(p.items); ++item) {
            const uint32_t first = scored.count;
            while (true) {
                ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[tile.stage()]), tile.phase());
                const int keys = read_keys(s.keys[tile.stage()], lane);
                if (keys == 0) break;
                if (kGroups == 1 || int(scored.count & 1) == group) {
                    pause(scores_pause);
                    auto own = ring;
                    own.advance(warp * kStageKeys < keys ? warp : 0);
                    ptx::mbarrier_wait(ptx::shared_address(&s.full[own.stage]), own.phase);
                    if (scored.count != first) adopt_maxima(scored.count - 1);
                    ptx::mbarrier_wait(ptx::shared_address(&s.scores_empty[scored.stage()]),
                                       scored.phase() ^ 1);
                    emulated().bar_sync(1 + group, 128);
                    if (kGroups == 2)
                        ptx::mbarrier_arrive(
                            ptx::shared_address(&s.maxima_published[scored.stage()]));
                    ptx::mbarrier_arrive(ptx::shared_address(&s.scores_full[scored.stage()]));
                }
                ring.advance((keys + kStageKeys - 1) / kStageKeys);
                ++scored.count;
                release_tile();
            }
            if (kGroups == 2 && scored.count != first && int((scored.count - 1) & 1) != group)
                adopt_maxima(scored.count - 1);
            ptx::mbarrier_wait(ptx::shared_address(&s.stats_empty), (item & 1) ^ 1);
            if (group == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.stats_full));
            release_tile();
        }
    }

    void output(typename L::Control& s, int own) {
        PipelineState<L::kStages> ring;
        PipelineCounter<kPublishedTiles> tile;
        PipelineCounter<kProbabilityTiles> scored;
        const int lane = ptx::laneid();
        for (uint32_t item = 0; item < uint32_t(p.items); ++item) {
            find_ends(p, s.ends, int(item), item, own);
            size_t taken = 0;
            while (true) {
                ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[tile.stage()]), tile.phase());
                const int keys = read_keys(s.keys[tile.stage()], lane);
                if (keys > 0) {
                    ptx::mbarrier_wait(ptx::shared_address(&s.scores_full[scored.stage()]),
                                       scored.phase());
                    for (int key = 0; key < keys; key += kStageKeys) {
                        ptx::mbarrier_wait(ptx::shared_address(&s.full[ring.stage]), ring.phase);
                        check_rows(item, taken + key, std::min(keys - key, kStageKeys), ring.stage);
                        pause(output_pause);
                        ++freed[ring.stage];
                        ptx::mbarrier_arrive(ptx::shared_address(&s.empty[ring.stage]));
                        ring.advance(1);
                    }
                    taken += keys;
                    ptx::mbarrier_arrive(ptx::shared_address(&s.scores_empty[scored.stage()]));
                    ++scored.count;
                }
                __syncwarp();
                if (lane == 0)
                    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[tile.stage()]));
                ++tile.count;
                if (keys == 0) break;
            }
            if (taken != expected[item].size()) Mbarrier::fail("an item lacks rows");
            ptx::mbarrier_wait(ptx::shared_address(&s.stats_full), item & 1);
            ptx::mbarrier_arrive(ptx::shared_address(&s.stats_empty));
        }
    }

    void check_rows(uint32_t item, size_t first, int keys, int stage) const {
        for (int key = 0; key < keys; ++key) {
            const char* row =
                ptx::dynamic_shared() + L::kRingOffset + stage * L::kStageBytes + key * R::kPitch;
            for (const char* part : {row, row + R::kLatentBytes + kEnd}) {
                uint32_t tag;
                std::memcpy(&tag, part, 4);
                if (first + key >= expected[item].size() || tag != expected[item][first + key])
                    Mbarrier::fail("a stage has the rows of another tile");
            }
        }
    }
};

template <int N, class R>
void explore(const char* name, unsigned seed) {
    using L = Layout<N, R>;
    std::minstd_rand random(seed);
    constexpr const char* kinds[] = {"one list", "two lists", "gaps", "all", "dense"};
    for (int kind = 0; kind < 5; ++kind)
        for (int speed = 0; speed < 4; ++speed) {
            // A cluster has one item, so only its lists can take it by surprise.
            Hopper::current().ranks = kind == 2 && speed == 3 ? 3 : 1;
            const Lists lists = draw(Kind(kind), random, int(Hopper::current().ranks));
            Run<L, R> run(lists, unsigned(random()));
            if (speed == 1) run.output_pause = 40;
            if (speed == 2) run.load_pause[random() % kLoadWarps] = 200, run.output_pause = 5;
            if (speed == 3) run.scores_pause = 100;
            std::printf("%s, %d slots, %s, speed %d\n", name, L::kStages, kinds[kind], speed);
            if (!run.go()) Mbarrier::fail("everybody waits");
        }
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned seed = argc > 1 ? std::atoi(argv[1]) : 1;
    explore<32, SameRows<__nv_bfloat16, 64>>("bf16, 32 heads", seed);
    explore<16, SameRows<__half, 64>>("f16, 16 heads", seed);
    explore<64, DsMlaRows<64>>("fp8_ds_mla, 64 heads", seed);
    explore<32, E4m3Rows<64>>("e4m3, 32 heads", seed);
    explore<16, DsMlaRows<64>>("fp8_ds_mla, 16 heads", seed);
    explore<16, SameRows<__nv_bfloat16, 0>>("bf16 without rope, 16 heads", seed);
    explore<64, DsMlaRows<0>>("fp8_ds_mla without rope, 64 heads", seed);
}
