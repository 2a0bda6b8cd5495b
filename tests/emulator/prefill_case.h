// A prefill problem in host memory, in which everything that must not be read is poisoned, and its
// result in f64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace mla::test {

struct PrefillCase {
    std::string name;
    int heads;
    std::vector<int> queries, keys;
    int nope, rope, value;
    bool causal = true;
    float spread = 1.f;
    // A value or a key that is not finite: its packed token, its head and its column.
    struct Place {
        int token, head, column;
        float value = NAN;
    };
    std::vector<Place> bad_values, bad_keys;
};

template <typename T>
struct PrefillProblem {
    PrefillCase c;
    int requests, query_tokens = 0, key_tokens = 0;
    std::vector<int> cu_query_lens{0}, cu_key_lens{0};
    std::vector<T> query, key_nope, key_rope, value, out;
    std::vector<float> lse;
    float softmax_scale;

    PrefillProblem(const PrefillCase& which, unsigned seed) : c(which), random_(seed) {
        requests = int(c.queries.size());
        for (int i = 0; i < requests; ++i) {
            cu_query_lens.push_back(query_tokens += c.queries[i]);
            cu_key_lens.push_back(key_tokens += c.keys[i]);
        }
        softmax_scale = c.spread / std::sqrt(float(c.nope + c.rope));
        query = values(size_t(query_tokens) * c.heads * (c.nope + c.rope));
        key_nope = values(size_t(key_tokens) * c.heads * c.nope);
        key_rope = values(size_t(key_tokens) * c.rope);
        value = values(size_t(key_tokens) * c.heads * c.value);
        for (const auto& at : c.bad_values)
            value[(size_t(at.token) * c.heads + at.head) * c.value + at.column] = T(at.value);
        for (const auto& at : c.bad_keys)
            key_nope[(size_t(at.token) * c.heads + at.head) * c.nope + at.column] = T(at.value);
        out.resize(size_t(query_tokens) * c.heads * c.value);
        std::memset(static_cast<void*>(out.data()), 0xff, out.size() * sizeof(T));
        lse.assign(size_t(c.heads) * query_tokens, NAN);
    }

    // Maximum deviations of an output, relative to its row, and of a log-sum-exp.
    void deviations(double& of_out, double& of_lse) const {
        of_out = of_lse = 0;
        for (int request = 0; request < requests; ++request)
            for (int i = 0; i < c.queries[request]; ++i)
                for (int head = 0; head < c.heads; ++head)
                    compare(request, i, head, of_out, of_lse);
    }

  private:
    // Random values, with NaN behind the last row.
    std::vector<T> values(size_t n) {
        std::normal_distribution<float> normal;
        std::vector<T> x(n + 4096);
        std::memset(static_cast<void*>(x.data()), 0xff, x.size() * sizeof(T));
        for (size_t i = 0; i < n; ++i) x[i] = T(normal(random_));
        return x;
    }

    void compare(int request, int i, int head, double& of_out, double& of_lse) const {
        const int row = cu_query_lens[request] + i, keys = c.keys[request];
        const int limit = c.causal ? keys - c.queries[request] + i + 1 : keys;
        const int dim = c.nope + c.rope;
        const T* q = query.data() + (size_t(row) * c.heads + head) * dim;
        std::vector<double> scores;
        double maximum = -INFINITY;
        for (int t = 0; t < limit; ++t) {
            const size_t key = cu_key_lens[request] + t;
            const T* k = key_nope.data() + (key * c.heads + head) * c.nope;
            const T* r = key_rope.data() + key * c.rope;
            double sum = 0;
            for (int j = 0; j < c.nope; ++j) sum += double(float(q[j])) * double(float(k[j]));
            for (int j = 0; j < c.rope; ++j)
                sum += double(float(q[c.nope + j])) * double(float(r[j]));
            scores.push_back(sum * softmax_scale);
            maximum = std::max(maximum, scores.back());
        }
        std::vector<double> expected(c.value);
        double total = 0;
        for (size_t t = 0; t < scores.size(); ++t) {
            const double weight = std::exp(scores[t] - maximum);
            total += weight;
            const T* v = value.data() + ((cu_key_lens[request] + t) * c.heads + head) * c.value;
            for (int j = 0; j < c.value; ++j) expected[j] += weight * double(float(v[j]));
        }
        const double expected_lse = scores.empty() ? -INFINITY : maximum + std::log(total);
        const T* got = out.data() + (size_t(row) * c.heads + head) * c.value;
        double largest = 1e-30, deviation = 0;
        for (int j = 0; j < c.value; ++j) {
            const double x = scores.empty() ? 0 : expected[j] / total;
            const double y = float(got[j]);
            if (!std::isfinite(x)) {
                if (!(x == y || (std::isnan(x) && std::isnan(y)))) deviation = INFINITY;
                continue;
            }
            largest = std::max(largest, std::fabs(x));
            const double d = std::fabs(y - x);
            if (!(d <= deviation) && deviation < INFINITY) deviation = std::isnan(d) ? INFINITY : d;
        }
        const double got_lse = lse[size_t(head) * query_tokens + row];
        const bool both_nan = std::isnan(expected_lse) && std::isnan(got_lse);
        const bool same = both_nan || expected_lse == got_lse;
        const double of = same ? 0 : std::fabs(expected_lse - got_lse);
        if (!(deviation / largest <= of_out)) of_out = deviation / largest;
        if (!(of <= of_lse)) of_lse = std::isnan(of) ? INFINITY : of;
    }

    std::mt19937 random_;
};

}  // namespace mla::test
