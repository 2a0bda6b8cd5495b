// A decode problem in host memory, in which everything that must not be read is poisoned, and its
// result in f64.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "sm80/decode/params.cuh"

namespace mla::test {

using sm80::decode::CacheFormat;

struct Case {
    std::string name;
    int heads;
    std::vector<int> q_lens, kv_lens;
    int latent = 512, rope = 64, page = 16;
    CacheFormat format = CacheFormat::plain;
    bool sparse = false, causal = true;
    // Spread of the scores: at 1 all tokens weigh about the same.
    float spread = 1.f;
    // Share of the entries of sparse lists that name no slot.
    float holes = 0.2f;
    // A token of request 0 with a value that is NaN: rows that see it are NaN, and no others.
    int nan_token = -1;
    // Exponents of the powers of two by which the scales of grouped bytes are multiplied: one set
    // for 16 tokens, the other for the next 16, in turn.
    std::array<std::array<int, 4>, 2> exponents = {};
    // Added to these exponents in every other request.
    int of_odd_requests = 0;
    // If not 0, the rotary values of queries are 1, and those of cached tokens are this number,
    // negated in the first, third … 16 tokens: the other tokens then have nearly all the weight.
    float lead = 0.f;
    // True if rotary keys lie in a tensor of their own, with strides of its own.
    bool split = false;
    // If not 0, the number of KV tiles of a split: each request's length decides its splits.
    int own_tiles = 0;
};

inline float e4m3_value(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float x = (byte & 127) == 127 ? NAN
                    : exponent          ? std::ldexp(8.f + mantissa, exponent - 10)
                                        : std::ldexp(float(mantissa), -9);
    return byte & 128 ? -x : x;
}

// Rounds to nearest.
inline uint8_t e4m3_byte(float x) {
    const float a = std::fabs(x);
    uint8_t best = 0;
    // Bytes of one sign ascend with their values.
    int low = 0, high = 126;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (e4m3_value(uint8_t(middle)) <= a)
            low = middle;
        else
            high = middle - 1;
    }
    best = uint8_t(low);
    if (low < 126 && e4m3_value(uint8_t(low + 1)) - a < a - e4m3_value(uint8_t(low))) ++best;
    return x < 0 ? best | 128 : best;
}

template <typename T>
struct Problem {
    Case c;
    int tokens = 0, requests, max_pages, pages, query_len = 0;
    int row_bytes, rope_row_bytes;
    std::vector<T> q_latent, q_rope, out;
    // `cache` has rows, or only latents if rotary keys lie in `cache_rope`.
    std::vector<char> cache, cache_rope;
    std::vector<int> table, kv_lens, cu_q_lens;
    std::vector<float> lse;
    float softmax_scale, cache_scale = 1.f;
    int64_t page_stride, rope_page_stride, lse_stride;

    Problem(const Case& which, unsigned seed) : c(which), random_(seed) {
        requests = int(c.q_lens.size());
        cu_q_lens.push_back(0);
        for (int n : c.q_lens) {
            tokens += n;
            query_len = std::max(query_len, n);
            cu_q_lens.push_back(tokens);
        }
        kv_lens = c.kv_lens;
        softmax_scale = c.spread / std::sqrt(float(c.latent + c.rope));
        if (c.format == CacheFormat::e4m3) cache_scale = 0.037f;
        row_bytes = c.format == CacheFormat::plain  ? 2 * (c.latent + c.rope)
                    : c.format == CacheFormat::e4m3 ? c.latent + c.rope
                    : c.format == CacheFormat::e4m3_grouped
                        ? c.latent + c.latent / 128 * 4 + 2 * c.rope
                        : c.latent + 2 * c.rope + 16;
        // Rows of both tensors have gaps of their own between them.
        rope_row_bytes = c.rope * value_bytes() + 48;
        if (c.split) row_bytes = c.latent * value_bytes() + 16;
        const int longest = *std::max_element(kv_lens.begin(), kv_lens.end());
        max_pages = (longest + c.page - 1) / c.page + 1;
        pages = requests * max_pages + 3;
        page_stride = int64_t(c.page) * row_bytes + 32;
        rope_page_stride = int64_t(c.page) * rope_row_bytes + 80;
        lse_stride = tokens + 5;
        q_latent = values(size_t(tokens) * c.heads * c.latent);
        q_rope = values(size_t(tokens) * c.heads * c.rope);
        if (c.lead != 0.f) q_rope.assign(q_rope.size(), T(1.f));
        fill_cache();
        out.assign(size_t(tokens) * c.heads * c.latent, poison());
        lse.assign(size_t(c.heads) * lse_stride, NAN);
    }

    // Maximum deviations of an output and of a log-sum-exp. An output's deviation is relative to
    // its row, or to the columns of a row that share a scale. Deviations are infinite if something
    // is NaN that must not be.
    void deviations(double& of_out, double& of_lse) const {
        of_out = of_lse = 0;
        for (int request = 0; request < requests; ++request)
            for (int i = 0; i < c.q_lens[request]; ++i)
                for (int head = 0; head < c.heads; ++head)
                    compare(request, i, head, of_out, of_lse);
    }

  private:
    static T poison() {
        T x;
        std::memset(static_cast<void*>(&x), 0xff, sizeof(x));
        return x;
    }

    std::vector<T> values(size_t n) {
        std::normal_distribution<float> normal;
        std::vector<T> x(n);
        for (T& v : x) v = T(normal(random_));
        return x;
    }

    // Bytes of a value of a cache without groups.
    int value_bytes() const { return c.format == CacheFormat::plain ? 2 : 1; }

    bool has_token_scale() const { return c.format == CacheFormat::e4m3_token; }
    // The offset of a latent value's scale in a row.
    int scale_offset(int column) const {
        return has_token_scale() ? c.latent + 2 * c.rope : c.latent + column / 128 * 4;
    }

    int64_t offset(int slot) const {
        return slot / c.page * page_stride + int64_t(slot % c.page) * row_bytes;
    }
    // The first byte of a slot's rotary key.
    const char* rope_of(int slot) const {
        if (c.split)
            return cache_rope.data() + slot / c.page * rope_page_stride +
                   int64_t(slot % c.page) * rope_row_bytes;
        return cache.data() + offset(slot) +
               (c.format == CacheFormat::e4m3_grouped ? c.latent + c.latent / 32
                                                      : c.latent * value_bytes());
    }

    // Puts pages in random order; all slots without a token are NaN.
    void fill_cache() {
        cache.assign(pages * page_stride, char(0xff));
        if (c.split) cache_rope.assign(pages * rope_page_stride, char(0xff));
        std::vector<int> free(pages);
        for (int i = 0; i < pages; ++i) free[i] = i;
        for (int i = pages; i > 1; --i) std::swap(free[i - 1], free[random_() % i]);
        table.assign(size_t(requests) * (c.sparse ? longest_list() : max_pages), 2147480000);
        for (int request = 0; request < requests; ++request) {
            int page = 0;
            for (int token = 0; token < kv_lens[request]; ++token) {
                if (token % c.page == 0) {
                    page = free.back();
                    free.pop_back();
                    if (!c.sparse) table[request * max_pages + token / c.page] = page;
                }
                const int slot = page * c.page + token % c.page;
                write_row(cache.data() + offset(slot), const_cast<char*>(rope_of(slot)),
                          token / 16 % 2, request % 2 * c.of_odd_requests);
                if (request == 0 && token == c.nan_token) {
                    const T nan = poison();
                    std::memcpy(cache.data() + offset(slot) + 6, &nan, sizeof(nan));
                }
                if (c.sparse) {
                    const bool hole = random_() % 1000 < c.holes * 1000;
                    table[size_t(request) * longest_list() + token] =
                        !hole           ? slot
                        : random_() % 2 ? -1
                                        : pages * c.page + int(random_() % 9);
                }
            }
        }
    }

    void write_row(char* row, char* rope, int half, int exponent) {
        std::normal_distribution<float> normal;
        const auto wide = [&](char* to, int n, auto type) {
            for (int i = 0; i < n; ++i) {
                const auto x = decltype(type)(normal(random_));
                std::memcpy(to + 2 * i, &x, 2);
            }
        };
        const auto bytes = [&](char* to, int n, float spread) {
            for (int i = 0; i < n; ++i) to[i] = char(e4m3_byte(normal(random_) * spread));
        };
        if (c.format == CacheFormat::plain) {
            wide(row, c.latent, T());
            return wide(rope, c.rope, T());
        }
        bytes(row, c.latent, c.format == CacheFormat::e4m3 ? 1 / cache_scale : 100.f);
        if (c.format == CacheFormat::e4m3) return bytes(rope, c.rope, 1 / cache_scale);
        for (int group = 0; group < (has_token_scale() ? 1 : c.latent / 128); ++group) {
            const float scale = std::ldexp(0.01f * (0.3f + std::fabs(normal(random_))),
                                           c.exponents[half][group] + exponent);
            std::memcpy(row + scale_offset(group * 128), &scale, 4);
        }
        wide(rope, c.rope, __nv_bfloat16());
        const auto lead = __nv_bfloat16(half ? c.lead : -c.lead);
        if (c.lead != 0.f)
            for (int i = 0; i < c.rope; ++i) std::memcpy(rope + 2 * i, &lead, 2);
    }

    double cached(int slot, int column) const {
        const char *row = cache.data() + offset(slot), *at = row;
        const bool rope = column >= c.latent;
        if (rope) at = rope_of(slot), column -= c.latent;
        if (c.format == CacheFormat::plain) return wide_at<T>(at + 2 * column);
        if (c.format == CacheFormat::e4m3)
            return double(e4m3_value(uint8_t(at[column]))) * cache_scale;
        if (rope) return wide_at<__nv_bfloat16>(at + 2 * column);
        float scale;
        std::memcpy(&scale, row + scale_offset(column), 4);
        return double(e4m3_value(uint8_t(at[column]))) * scale;
    }

    template <typename Wide>
    static double wide_at(const char* at) {
        Wide x;
        std::memcpy(static_cast<void*>(&x), at, 2);
        return double(float(x));
    }

    void compare(int request, int i, int head, double& of_out, double& of_lse) const {
        const int token = cu_q_lens[request] + i;
        const int limit =
            c.causal ? kv_lens[request] - c.q_lens[request] + i + 1 : kv_lens[request];
        const T* ql = q_latent.data() + (size_t(token) * c.heads + head) * c.latent;
        const T* qr = q_rope.data() + (size_t(token) * c.heads + head) * c.rope;
        std::vector<int> rows;
        std::vector<double> scores;
        double maximum = -INFINITY;
        for (int t = 0; t < limit; ++t) {
            int slot;
            if (c.sparse) {
                slot = table[size_t(request) * longest_list() + t];
                if (slot < 0 || slot >= pages * c.page) continue;
            } else {
                slot = table[request * max_pages + t / c.page] * c.page + t % c.page;
            }
            rows.push_back(slot);
            double sum = 0;
            for (int j = 0; j < c.latent; ++j) sum += double(float(ql[j])) * cached(rows.back(), j);
            for (int j = 0; j < c.rope; ++j)
                sum += double(float(qr[j])) * cached(rows.back(), c.latent + j);
            scores.push_back(sum * softmax_scale);
            maximum = std::max(maximum, scores.back());
        }
        double total = 0;
        std::vector<double> expected(c.latent);
        for (size_t t = 0; t < rows.size(); ++t) {
            const double weight = std::exp(scores[t] - maximum);
            total += weight;
            for (int j = 0; j < c.latent; ++j) expected[j] += weight * cached(rows[t], j);
        }
        const double expected_lse = rows.empty() ? -INFINITY : maximum + std::log(total);
        const T* got = out.data() + (size_t(token) * c.heads + head) * c.latent;
        const auto keep = [](double& most, double x) {
            if (!(x <= most)) most = std::isnan(x) ? INFINITY : x;
        };
        if (request == 0 && c.nan_token >= 0 && c.nan_token < limit) {
            for (int j = 0; j < c.latent; ++j)
                if (!std::isnan(float(got[j]))) of_out = INFINITY;
            if (!std::isnan(lse[head * lse_stride + token])) of_lse = INFINITY;
            return;
        }
        // The rounding of the output itself loses half a step of f16's smallest numbers.
        const double rounding = std::is_same_v<T, __half> ? 0x1p-25 : 0;
        const bool scales = c.format == CacheFormat::e4m3_grouped || has_token_scale();
        const int width = scales ? 128 : c.latent;
        for (int first = 0; first < c.latent; first += width) {
            double largest = 1e-30, deviation = 0;
            for (int j = first; j < first + width; ++j) {
                const double x = rows.empty() ? 0 : expected[j] / total;
                largest = std::max(largest, std::fabs(x));
                keep(deviation, std::fabs(double(float(got[j])) - x) - rounding);
            }
            keep(of_out, rows.empty() ? deviation : deviation / largest);
        }
        const double got_lse = lse[head * lse_stride + token];
        const double lse_deviation =
            expected_lse == got_lse ? 0 : std::fabs(expected_lse - got_lse);
        keep(of_lse, lse_deviation);
    }

  public:
    int longest_list() const { return max_pages * c.page; }

  private:
    std::mt19937 random_;
};

}  // namespace mla::test
