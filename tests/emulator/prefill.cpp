// The prefill kernels of the portable family, run on the host by the emulator.
#include "ptx/sm80.cuh"
#include "sm80/prefill/kernel.cuh"

#include "prefill_case.h"

namespace {

using namespace mla::sm80::prefill;
using mla::test::PrefillCase;
using mla::test::PrefillProblem;

int failures = 0;

template <class C, typename T>
KernelParams params_of(PrefillProblem<T>& x) {
    const PrefillCase& c = x.c;
    const int qk_dim = c.nope + c.rope;
    KernelParams p = {};
    p.query = reinterpret_cast<const char*>(x.query.data());
    p.key_nope = reinterpret_cast<const char*>(x.key_nope.data());
    p.key_rope = reinterpret_cast<const char*>(x.key_rope.data());
    p.value = reinterpret_cast<const char*>(x.value.data());
    p.out = x.out.data();
    p.lse = x.lse.data();
    p.cu_query_lens = x.cu_query_lens.data();
    p.cu_key_lens = x.cu_key_lens.data();
    p.query_head_stride = qk_dim * 2;
    p.query_token_stride = p.query_head_stride * c.heads;
    p.key_nope_head_stride = c.nope * 2;
    p.key_nope_token_stride = p.key_nope_head_stride * c.heads;
    p.key_rope_head_stride = 0;
    p.key_rope_token_stride = c.rope * 2;
    p.value_head_stride = p.out_head_stride = c.value * 2;
    p.value_token_stride = p.out_token_stride = p.value_head_stride * c.heads;
    p.lse_head_stride = x.query_tokens;
    p.requests = x.requests;
    p.heads = c.heads;
    p.nope_dim = c.nope;
    p.tiles = x.query_tokens / C::kRows + x.requests;
    p.max_request_tiles = 0;
    for (int n : c.queries)
        p.max_request_tiles = std::max(p.max_request_tiles, (n + C::kRows - 1) / C::kRows);
    p.head_group = 2;
    p.causal = c.causal;
    p.scale_log2 = x.softmax_scale * 1.44269504088896340736f;
    return p;
}

// Runs a launch whose keys are not divided.
template <class C, typename T>
void run_undivided(PrefillProblem<T>& x, int head_group, unsigned seed) {
    KernelParams p = params_of<C>(x);
    p.splits = 1;
    p.head_group = head_group;
    mla::emulator::launch(prefill_kernel<C>, p.tiles * p.heads, C::kThreads, C::kSharedBytes, p,
                          seed, false);
}

// Compares the bits of each request in a batch whose keys are not divided with those that the
// request has alone. Alone, a request of few rows runs in the config for few rows.
template <typename T, int kQkDim, int kVDim, int kWarpTiles, int kWarps, int kKeys>
void check_alone(const PrefillCase& c, unsigned seed) {
    using C = Config<T, kQkDim, kVDim, kWarpTiles, kWarps, kKeys>;
    using Short = Config<T, kQkDim, kVDim, 1, kWarps, kKeys>;
    PrefillProblem<T> x(c, seed);
    run_undivided<C>(x, c.heads, seed);
    bool same = true;
    for (int request = 0; request < x.requests; ++request) {
        PrefillCase one = c;
        one.queries = {c.queries[request]};
        one.keys = {c.keys[request]};
        PrefillProblem<T> y(one, seed + 1);
        const int query = x.cu_query_lens[request], key = x.cu_key_lens[request];
        const auto copy = [](auto& to, const auto& from, int first, int rows, size_t width) {
            std::copy_n(from.begin() + first * width, rows * width, to.begin());
        };
        copy(y.query, x.query, query, one.queries[0], size_t(c.heads) * kQkDim);
        copy(y.key_nope, x.key_nope, key, one.keys[0], size_t(c.heads) * c.nope);
        copy(y.key_rope, x.key_rope, key, one.keys[0], c.rope);
        copy(y.value, x.value, key, one.keys[0], size_t(c.heads) * c.value);
        if (y.query_tokens <= Short::kRows)
            run_undivided<Short>(y, 1, seed + 2);
        else
            run_undivided<C>(y, 1, seed + 2);
        const size_t width = size_t(c.heads) * kVDim;
        same = same && !std::memcmp(y.out.data(), x.out.data() + query * width,
                                    y.out.size() * sizeof(T));
        for (int head = 0; head < c.heads; ++head)
            same = same && !std::memcmp(y.lse.data() + size_t(head) * y.query_tokens,
                                        x.lse.data() + size_t(head) * x.query_tokens + query,
                                        y.query_tokens * sizeof(float));
    }
    failures += !same;
    std::printf("%s %-28s alone\n", same ? "ok  " : "FAIL", c.name.c_str());
    std::fflush(stdout);
}

// With `splits` of 0, each request has its own number of splits, as on a device that runs `slots`
// CTAs at a time.
template <typename T, int kQkDim, int kVDim, int kWarpTiles, int kWarps, int kKeys>
void check(const PrefillCase& c, unsigned seed, int splits = 1, int slots = 0) {
    using C = Config<T, kQkDim, kVDim, kWarpTiles, kWarps, kKeys>;
    PrefillProblem<T> x(c, seed);
    KernelParams p = params_of<C>(x);
    p.splits = splits;
    p.slots = slots;
    p.max_split_ctas = 2 * slots;
    if (splits == 0) p.head_group = c.heads;
    const int tiles = p.tiles * c.heads;
    const int ctas = splits > 0 ? tiles * splits : tiles + p.max_split_ctas;
    constexpr int kFloats = mla::sm80::kPartialFloats<SplitLayout<C>>;
    std::vector<float> partials(size_t(ctas) * kFloats, NAN);
    std::vector<int32_t> counters(ctas * 2);
    p.partials = partials.data();
    p.counters = counters.data();
    std::vector<T> first;
    bool same = true;
    // In the first run, CTAs wait for each other. In the second, they lose patience. In the third,
    // they run one after another and never meet.
    for (int run = 0; run < (splits == 1 ? 1 : 3); ++run) {
        p.patience = run == 0 ? INT64_MAX : run == 1 ? 100000 : -1;
        mla::emulator::launch(prefill_kernel<C>, ctas, C::kThreads, C::kSharedBytes, p, seed + run,
                              splits != 1 && run < 2);
        if (run == 0) first = x.out;
        same = same && !std::memcmp(first.data(), x.out.data(), first.size() * sizeof(T));
        for (int32_t n : counters) same = same && n == 0;
    }
    double of_out, of_lse;
    x.deviations(of_out, of_lse);
    const double allowed = std::is_same_v<T, __half> ? 2e-3 : 1.2e-2;
    const bool good = of_out < allowed && of_lse < 2e-5 * (1 + c.spread) && same;
    failures += !good;
    std::printf("%s %-28s out %.1e lse %.1e\n", good ? "ok  " : "FAIL", c.name.c_str(), of_out,
                of_lse);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned seed = argc > 1 ? std::atoi(argv[1]) : 1;
    using B = __nv_bfloat16;
    using H = __half;
    check<B, 192, 128, 2, 4, 64>({"192/128", 1, {150}, {150}, 128, 64, 128}, seed);
    check<B, 192, 128, 2, 4, 64>(
        {"ragged", 3, {40, 0, 1, 70}, {90, 5, 0, 70}, 128, 64, 128, true, 6.f}, seed);
    check<H, 192, 128, 1, 4, 64>({"context", 2, {20, 3}, {100, 0}, 128, 64, 128, false}, seed);
    check<B, 256, 256, 1, 4, 64>({"256/256", 1, {70}, {80}, 192, 64, 256}, seed);
    check<H, 256, 128, 1, 4, 64>({"256/128", 1, {70}, {80}, 192, 64, 128}, seed);
    check<B, 256, 256, 1, 4, 64>({"no rope", 1, {20}, {80}, 256, 0, 256}, seed);
    check<B, 128, 64, 2, 4, 64>({"128/64", 1, {70}, {80}, 64, 64, 64}, seed);
    check<H, 96, 64, 2, 4, 64>({"96/64", 2, {70}, {50}, 64, 32, 64}, seed);
    // Bad values within tiles of 32 and at their edges, in rows that see them and rows that do not.
    PrefillCase bad = {"NaN values", 2, {150}, {150}, 128, 64, 128};
    bad.bad_values = {{0, 1, 3},  {33, 0, 0},   {63, 0, 127},
                      {64, 0, 5}, {149, 1, 64}, {100, 0, 7, INFINITY}};
    check<B, 192, 128, 2, 4, 64>(bad, seed);
    bad = {"NaN values, 256", 1, {70}, {80}, 192, 64, 256};
    bad.bad_values = {{9, 0, 3}, {40, 0, 255}, {41, 0, 1, -INFINITY}, {79, 0, 0}};
    check<H, 256, 256, 1, 4, 64>(bad, seed);
    bad = {"NaN values, context", 2, {40}, {90}, 128, 64, 128, false};
    bad.bad_values = {{50, 0, 3}, {89, 1, 77}};
    check<B, 192, 128, 2, 4, 64>(bad, seed);
    bad = {"NaN keys", 2, {150}, {150}, 128, 64, 128};
    bad.bad_keys = {{30, 0, 3}, {70, 0, 1}, {149, 1, 64}};
    check<B, 192, 128, 2, 4, 64>(bad, seed);
    check<B, 192, 128, 2, 4, 64>({"splits", 2, {70}, {400}, 128, 64, 128, true, 4.f}, seed, 3);
    check<H, 192, 128, 2, 4, 64>(
        {"splits, ragged", 1, {40, 0, 1, 130}, {90, 5, 0, 330}, 128, 64, 128, true, 6.f}, seed, 5);
    check<B, 256, 128, 1, 4, 64>({"splits, 256/128", 1, {70}, {400}, 192, 64, 128}, seed, 3);
    check<B, 256, 256, 1, 4, 64>({"splits, context", 1, {50}, {300}, 192, 64, 256, false}, seed, 4);
    // Each request has its own number of splits. There is one long request, or two of them, or
    // eight among seventy, which are more than a warp has lanes.
    const PrefillCase uneven = {"own splits", 2, {40, 0, 130}, {90, 5, 900}, 128, 64, 128, false};
    check<B, 192, 128, 2, 4, 64>(uneven, seed, 0, 24);
    check<H, 192, 128, 2, 4, 64>(
        {"own splits, causal", 1, {40, 0, 1, 130}, {900, 5, 70, 530}, 128, 64, 128, true, 6.f},
        seed, 0, 16);
    PrefillCase many = {"own splits, many requests", 1, {}, {}, 64, 32, 64};
    for (int i = 0; i < 70; ++i) {
        many.queries.push_back(1 + i % 3);
        many.keys.push_back(i % 9 == 4 ? 300 + i : 20);
    }
    check<B, 96, 64, 1, 4, 64>(many, seed, 0, 40);
    // Tiles around their ends, requests without queries or keys, and many KV tiles.
    const PrefillCase mixed = {
        "undivided", 2, {1, 130, 0, 64, 65, 3}, {1, 330, 5, 64, 700, 0}, 128, 64, 128};
    check_alone<B, 192, 128, 2, 4, 64>(mixed, seed);
    PrefillCase context = mixed;
    context.causal = false;
    check_alone<H, 192, 128, 2, 4, 64>(context, seed);
    check_alone<B, 256, 256, 1, 4, 64>(
        {"undivided, 256", 1, {70, 3, 20}, {80, 300, 20}, 192, 64, 256}, seed);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
