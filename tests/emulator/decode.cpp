// The decode kernels of the portable family, run on the host by the emulator.
#include "ptx/sm80.cuh"
#include "sm80/decode/fit.cuh"
#include "sm80/decode/kernel_of.cuh"

#include "decode_case.h"

namespace {

using namespace mla::sm80::decode;
using mla::test::Case;
using mla::test::Problem;

int failures = 0;

// Bytes of shared memory of a CTA and of an SM. `kMiddle` has those of compute capability 8.0, and
// `kLarge` those of 9.0.
struct Room {
    int of_cta, of_sm;
};
constexpr Room kMiddle = {166912, 167936}, kLarge = {232448, 233472};

template <class C>
void check_config(const Case& c, unsigned seed, const Room& room, int multiprocessors) {
    using T = typename C::Element;
    Problem<T> x(c, seed);
    const int pair = pair_of(x.query_len * c.heads, C::kRows);
    const OwnSplits own = {c.own_tiles, OwnSplits::kMax};
    const Fit f = fit<C>(room.of_cta, room.of_sm, 1024, multiprocessors, c.rope, pair, own);
    std::vector<char> workspace(f.workspace_bytes, 0);
    std::memset(workspace.data() + kCounterBytes, 0xff, f.workspace_bytes - kCounterBytes);

    KernelParams p = {};
    p.q_latent = x.q_latent.data();
    p.q_rope = x.q_rope.data();
    p.cache = x.cache.data();
    p.out = x.out.data();
    p.lse = x.lse.data();
    p.block_table = x.table.data();
    p.kv_lens = x.kv_lens.data();
    p.cu_q_lens = x.cu_q_lens.data();
    p.counters = reinterpret_cast<int32_t*>(workspace.data());
    p.partials = reinterpret_cast<float*>(workspace.data() + kCounterBytes);
    p.q_latent_head_stride = c.latent;
    p.q_latent_token_stride = int64_t(c.heads) * c.latent;
    p.q_rope_head_stride = c.rope;
    p.q_rope_token_stride = int64_t(c.heads) * c.rope;
    p.out_head_stride = c.latent;
    p.out_token_stride = int64_t(c.heads) * c.latent;
    p.lse_head_stride = x.lse_stride;
    p.cache_page_stride = x.page_stride;
    p.cache_slot_stride = x.row_bytes;
    p.cache_rope = x.cache_rope.data();
    p.cache_rope_page_stride = x.rope_page_stride;
    p.cache_rope_slot_stride = x.rope_row_bytes;
    p.split = c.split;
    p.block_table_stride = c.sparse ? x.longest_list() : x.max_pages;
    p.slots = int64_t(x.pages) * c.page;
    p.requests = x.requests;
    p.heads = c.heads;
    p.query_len = x.query_len;
    p.page_size = c.page;
    p.page_shift = (c.page & (c.page - 1)) ? -1 : std::countr_zero(unsigned(c.page));
    p.rope_dim = c.rope;
    p.pitch = C::pitch(c.rope);
    p.stages = f.stages;
    p.pair = pair;
    p.max_kv_len = INT32_MAX;
    p.causal = c.causal;
    p.sparse = c.sparse;
    p.tile_cost = 1;
    p.min_share = 2;
    p.own = own;
    // Both divisions are tested if groups are few: with odd seeds, ranges are even.
    p.even_gain = seed % 2 ? 2 : -1000;
    p.scale_log2 = x.softmax_scale * x.cache_scale * 1.44269504088896340736f;
    p.out_scale = x.cache_scale;

    const std::vector<T> untouched = x.out;
    const std::vector<float> untouched_lse = x.lse;
    std::vector<T> first;
    std::vector<float> first_lse;
    // In the first run, CTAs wait for each other. In the second, they lose patience. In the third,
    // they run one after another and never meet.
    for (unsigned run = 0; run < 3; ++run) {
        p.patience = run == 0 ? INT64_MAX : run == 1 ? 100000 : -1;
        mla::emulator::launch(kernel_of<C>(), f.ctas, C::kCtaThreads, f.shared_bytes, p,
                              seed * 31 + run, run < 2);
        if (run == 0) {
            first = x.out;
            first_lse = x.lse;
        }
    }
    // Each request alone, on other numbers of CTAs.
    if (c.own_tiles > 0) {
        x.out = untouched;
        x.lse = untouched_lse;
        for (int request = 0; request < x.requests; ++request) {
            KernelParams alone = p;
            alone.requests = 1;
            alone.cu_q_lens += request;
            alone.kv_lens += request;
            alone.block_table += request * p.block_table_stride;
            const int ctas = std::max(f.ctas / (1 + request) / pair, 1) * pair;
            mla::emulator::launch(kernel_of<C>(), ctas, C::kCtaThreads, f.shared_bytes, alone,
                                  seed * 37 + request, false);
        }
    }
    double of_out, of_lse;
    x.deviations(of_out, of_lse);
    const bool same = !std::memcmp(first.data(), x.out.data(), first.size() * sizeof(T)) &&
                      !std::memcmp(first_lse.data(), x.lse.data(), first_lse.size() * 4);
    bool zero = true;
    for (size_t i = 0; i < kCounterBytes; ++i) zero = zero && workspace[i] == 0;
    const double allowed = std::is_same_v<T, __half> ? 2e-3 : 1.2e-2;
    const bool good = of_out < allowed && of_lse < 2e-5 * (1 + c.spread) && same && zero;
    failures += !good;
    std::printf("%s %-28s rows %d tokens %d stages %d ctas %d: out %.1e lse %.1e%s%s\n",
                good ? "ok  " : "FAIL", c.name.c_str(), C::kRows, C::kTokens, f.stages, f.ctas,
                of_out, of_lse, same ? "" : ", repeats differ",
                zero ? "" : ", counters are not zero");
    std::fflush(stdout);
}

template <typename T, int kLatent, CacheFormat kFormat, int kWarpTiles, int kRowGroups, int kTokens>
void check(const Case& c, unsigned seed, const Room& room = {101376, 102400},
           int multiprocessors = 6) {
    check_config<Config<T, kLatent, kFormat, kWarpTiles, kRowGroups, kTokens>>(c, seed, room,
                                                                               multiprocessors);
}

// Warps with roles, configured as a launch does it: 64 rows by 32 tokens.
template <typename T>
void check_roles(const Case& c, unsigned seed, const Room& room = kLarge, int multiprocessors = 6) {
    using Fewer = RoleConfig<T, 512, 32, 16>;
    using More = RoleConfig<T, 512, 32, 18>;
    if (fit<Fewer>(room.of_cta, room.of_sm, 1024, multiprocessors, c.rope, 1).ctas > 0)
        check_config<Fewer>(c, seed, room, multiprocessors);
    else
        check_config<More>(c, seed, room, multiprocessors);
}

// Tries a cache of two tensors: with block tables and with lists, in pages of 2^n slots and of
// other numbers, and with a last token of NaN that one query token sees.
void check_split(unsigned seed) {
    using B = __nv_bfloat16;
    using H = __half;
    constexpr auto plain = CacheFormat::plain;
    constexpr auto e4m3 = CacheFormat::e4m3;
    Case c = {"two tensors", 5, {1, 3, 0, 1}, {70, 133, 9, 0}};
    c.split = true;
    c.spread = 8.f;
    Case bytes = c;
    bytes.format = e4m3;
    for (int page : {16, 48, 64}) {
        c.page = bytes.page = page;
        check<B, 512, plain, 1, 1, 16>(c, seed);
        check<H, 512, plain, 1, 1, 32>(c, seed);
        check<B, 512, e4m3, 1, 1, 32>(bytes, seed);
        check<H, 512, e4m3, 2, 1, 16>(bytes, seed);
        c.heads = 20;
        check<B, 512, plain, 2, 2, 16>(c, seed);
        c.heads = 5;
    }
    c.nan_token = bytes.nan_token = 69;
    c.q_lens[0] = bytes.q_lens[0] = 4;
    check<B, 512, plain, 2, 2, 16>(c, seed);
    check<B, 512, e4m3, 2, 2, 16>(bytes, seed);
    Case narrow = {"two tensors of 256 + 32", 16, {1, 1}, {40, 21}, 256, 32, 16, e4m3};
    narrow.split = true;
    check<H, 256, e4m3, 2, 2, 16>(narrow, seed);
    narrow.format = plain;
    check<B, 256, plain, 1, 1, 32>(narrow, seed);
    Case sparse = {"two tensors, sparse", 64, {1, 1}, {150, 33}, 512, 64, 48, plain, true, false};
    sparse.split = true;
    check<H, 512, plain, 2, 2, 16>(sparse, seed);
    sparse.heads = 16;
    sparse.page = 64;
    check<B, 512, plain, 1, 1, 32>(sparse, seed);
    sparse.format = e4m3;
    check<B, 512, e4m3, 1, 1, 16>(sparse, seed);
}

// Tries all configs of bytes with scales in their rows, with both types of queries.
template <CacheFormat kFormat>
void check_scales(Case c, unsigned seed, int multiprocessors = 6) {
    using B = __nv_bfloat16;
    using H = __half;
    c.format = kFormat;
    check<B, 512, kFormat, 1, 1, 16>(c, seed, kMiddle, multiprocessors);
    check<H, 512, kFormat, 1, 1, 16>(c, seed, kMiddle, multiprocessors);
    check<H, 512, kFormat, 1, 1, 32>(c, seed, kMiddle, multiprocessors);
    check<H, 512, kFormat, 2, 1, 16>(c, seed, kMiddle, multiprocessors);
    check<H, 512, kFormat, 2, 2, 16>(c, seed, kMiddle, multiprocessors);
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned seed = argc > 1 ? std::atoi(argv[1]) : 1;
    using B = __nv_bfloat16;
    using H = __half;
    constexpr auto plain = CacheFormat::plain;
    constexpr auto e4m3 = CacheFormat::e4m3;
    constexpr auto grouped = CacheFormat::e4m3_grouped;
    constexpr auto token = CacheFormat::e4m3_token;
    check<B, 512, plain, 1, 1, 16>({"one token", 16, {1}, {40}}, seed);
    check<B, 512, plain, 1, 1, 16>(
        {"ragged", 5, {1, 3, 0, 1}, {70, 33, 9, 0}, 512, 64, 16, plain, false, true, 8.f}, seed);
    check<B, 512, plain, 1, 1, 16>(
        {"pages of 48", 5, {1, 3, 0, 1}, {70, 133, 9, 0}, 512, 64, 48, plain, false, true, 8.f},
        seed);
    check<B, 512, plain, 1, 1, 16>({"pages of 64", 16, {1, 1, 1}, {190, 5, 90}, 512, 64, 64}, seed);
    Case nan = {"NaN in a later token", 4, {4, 1}, {70, 20}, 512, 64, 16};
    nan.nan_token = 68;
    check<B, 512, plain, 1, 1, 16>(nan, seed);
    nan.heads = 16;
    check<H, 512, plain, 2, 2, 16>(nan, seed);
    check_roles<H>(nan, seed);
    nan.format = e4m3;
    check<B, 512, e4m3, 1, 1, 32>(nan, seed);
    Case drafts = {"drafts that see each other", 5, {1, 4, 0, 3}, {70, 133, 9, 3}};
    drafts.causal = false;
    drafts.spread = 8.f;
    check<B, 512, plain, 1, 1, 16>(drafts, seed);
    check<H, 512, plain, 2, 2, 16>(drafts, seed);
    check_roles<H>(drafts, seed);
    drafts.format = e4m3;
    check<B, 512, e4m3, 1, 1, 32>(drafts, seed);
    drafts.format = grouped;
    check<H, 512, grouped, 1, 1, 32>(drafts, seed);
    drafts.format = token;
    check<B, 512, token, 1, 1, 32>(drafts, seed);
    check<H, 512, plain, 1, 1, 32>({"wide tiles", 16, {1, 1}, {100, 31}, 512, 64, 48}, seed);
    check<B, 512, e4m3, 1, 1, 16>({"e4m3", 16, {1, 1}, {50, 17}, 512, 64, 32, e4m3}, seed);
    check<H, 512, e4m3, 1, 1, 16>({"e4m3 f16", 7, {2}, {50}, 512, 64, 48, e4m3}, seed);
    check<B, 512, grouped, 1, 1, 16>({"grouped", 16, {1, 1}, {50, 17}, 512, 64, 16, grouped}, seed);
    check<H, 512, grouped, 1, 1, 32>({"grouped f16", 16, {1, 1}, {50, 17}, 512, 64, 16, grouped},
                                     seed);
    check<B, 512, plain, 2, 1, 16>({"32 rows", 20, {1, 1}, {50, 17}}, seed);
    check<B, 512, plain, 2, 2, 16>({"64 rows", 61, {1, 1}, {80, 17}}, seed);
    check_roles<B>({"one token", 64, {1}, {40}}, seed);
    check_roles<H>({"many tiles", 64, {1}, {330}}, seed, kLarge, 2);
    Case pages = {"ragged, other pages", 20, {1, 3, 0, 1}, {70, 233, 9, 0}};
    pages.spread = 8.f;
    for (int page : {16, 48, 64}) {
        pages.page = page;
        check_roles<B>(pages, seed, page == 48 ? kMiddle : kLarge, 4);
    }
    check_roles<B>({"sparse", 64, {1, 1}, {150, 33}, 512, 64, 48, plain, true, false}, seed);
    check_roles<B>({"sparse, no rope", 64, {1, 1}, {150, 33}, 512, 0, 48, plain, true, false},
                   seed);
    check_roles<B>({"128 rows", 128, {2, 1}, {70, 33}, 512, 64, 32}, seed, kMiddle);
    check_roles<B>({"no rope", 33, {1}, {40}, 512, 0}, seed);
    check_roles<B>({"rope 32", 33, {1, 1}, {40, 90}, 512, 32}, seed);
    check<H, 512, plain, 1, 1, 16>({"many parts", 16, {1}, {900}, 512, 64, 64}, seed,
                                   {101376, 102400}, 40);
    // With odd seeds, each range has whole tiles of rows.
    check<B, 512, plain, 1, 1, 16>({"alike", 16, {1, 1, 1}, {40, 40, 40}}, seed, {101376, 102400},
                                   1);
    check_roles<B>({"alike", 64, {1, 1, 1, 1, 1}, {70, 70, 70, 70, 70}}, seed, kLarge, 3);
    check<B, 512, plain, 2, 2, 16>({"128 rows", 128, {2, 1}, {70, 33}, 512, 64, 32}, seed);
    check<B, 512, e4m3, 2, 2, 16>({"64 rows e4m3", 64, {1}, {70}, 512, 64, 16, e4m3}, seed);
    check<B, 512, grouped, 2, 2, 16>({"64 rows grouped", 50, {1}, {70}, 512, 64, 16, grouped},
                                     seed);
    check<B, 512, grouped, 2, 1, 16>(
        {"sparse", 32, {1, 1}, {50, 33}, 512, 64, 64, grouped, true, false}, seed);
    check<B, 512, token, 2, 1, 16>(
        {"sparse, token", 32, {1, 1}, {50, 33}, 512, 64, 64, token, true, false}, seed);
    check<B, 512, e4m3, 2, 2, 16>(
        {"sparse e4m3, no rope", 50, {1, 1}, {70, 33}, 512, 0, 48, e4m3, true, false}, seed);
    check<B, 512, plain, 1, 1, 16>(
        {"sparse plain, no rope", 16, {1, 1}, {50, 33}, 512, 0, 48, plain, true, false}, seed);
    check<B, 512, token, 2, 2, 16>({"64 rows token", 50, {1}, {70}, 512, 64, 16, token}, seed);
    check<B, 512, plain, 1, 1, 16>(
        {"sparse plain", 16, {1, 1}, {50, 33}, 512, 64, 48, plain, true, false}, seed);
    check<B, 512, plain, 1, 1, 16>({"no rope", 16, {1}, {40}, 512, 0}, seed);
    check<B, 256, plain, 1, 1, 16>({"256 + 32", 16, {1}, {40}, 256, 32}, seed);
    check<H, 256, e4m3, 1, 1, 16>({"256 + 64 e4m3", 16, {1}, {40}, 256, 64, 16, e4m3}, seed);
    check<B, 256, plain, 2, 2, 16>({"256 + 64, 64 rows", 40, {2, 1}, {40, 20}, 256, 64}, seed);
    check_split(seed);
    // Scales that differ between groups. In further cases they also differ between tokens, and in
    // some of these the weight lies on the tokens with smaller scales. Either the largest values
    // are near f16's maximum, or the smallest ones are near its minimum.
    for (int far : {-10, -20, -30}) {
        const int top = std::min(12, -14 - far), low = top + far;
        Case scales = {
            "scales 2^" + std::to_string(far), 16, {1, 1}, {50, 17}, 512, 64, 16, grouped};
        scales.spread = std::ldexp(1.f, -top);
        scales.exponents = {{{top, low, top, (top + low) / 2}, {top, low, top, (top + low) / 2}}};
        check_scales<grouped>(scales, seed);
        scales.name += ", tokens";
        scales.exponents = {{{low, low, low, low}, {top, top, top, low}}};
        check_scales<grouped>(scales, seed);
        check_scales<token>(scales, seed);
        scales.name += ", weight";
        std::swap(scales.exponents[0], scales.exponents[1]);
        scales.lead = std::ldexp(7.5f, top);
        if (far >= -20) {
            check_scales<grouped>(scales, seed);
            check_scales<token>(scales, seed);
        }
    }
    // Splits follow each request's own length. Tiles of rows are one CTA's, or several CTAs share
    // them, with one split each or more.
    for (int multiprocessors : {2, 5, 24}) {
        const auto batch = [&](const char* name, int heads, CacheFormat format) {
            Case c = {name, heads, {1, 2, 1, 0, 1}, {150, 70, 1, 40, 0}, 512, 64, 16, format};
            c.spread = 8.f;
            c.own_tiles = 2;
            return c;
        };
        check<B, 512, plain, 1, 1, 16>(batch("own splits", 8, plain), seed, kLarge,
                                       multiprocessors);
        check<H, 512, e4m3, 1, 1, 32>(batch("own splits", 16, e4m3), seed, kLarge,
                                      multiprocessors);
        check<B, 512, plain, 2, 1, 16>(batch("own splits", 20, plain), seed, kLarge,
                                       multiprocessors);
        check<H, 512, grouped, 2, 2, 16>(batch("own splits", 40, grouped), seed, kLarge,
                                         multiprocessors);
        check_roles<B>(batch("own splits", 40, plain), seed, kLarge, multiprocessors);
        check_roles<H>(batch("own splits, pairs", 70, plain), seed, kLarge, multiprocessors);
        Case many = {"many own splits", 16, {1, 1}, {1200, 35}, 512, 64, 16};
        many.own_tiles = 1;
        check<H, 512, plain, 1, 1, 16>(many, seed, kLarge, multiprocessors);
    }
    // A CTA's items belong to requests whose scales are far apart.
    Case requests = {"scales of requests", 16, {1, 1, 1, 1, 1, 1}, {33, 40, 35, 50, 33, 40}};
    requests.spread = 0x1p-12f;
    requests.exponents = {{{12, 12, 12, 12}, {12, 12, 12, 12}}};
    requests.of_odd_requests = -25;
    check_scales<grouped>(requests, seed, 1);
    check_scales<token>(requests, seed, 1);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
