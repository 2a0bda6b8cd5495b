#include <algorithm>

#include "../../../common/device.cuh"
#include "../launch.cuh"
#include "../quantise/check.cuh"
#include "kernel.cuh"
#include "sm90/mla_sm90.h"

namespace mla::sm90::project {
namespace {

// What a CTA may have of shared memory, and the rank whose latent leaves room for two stages of
// weights beside it.
constexpr int kMostBytes = 227 * 1024;
constexpr int kMostRank = 2560;

MlaStatus check(const MlaIndexProjectionParams& p, const MlaIndexQueriesParams& q) {
    const bool along_rank = p.weights_rank_stride == 1;
    Check check;
    check
        .that(p.dtype == MLA_DTYPE_BF16 || p.dtype == MLA_DTYPE_F16, "dtype", p.dtype,
              "MLA_DTYPE_BF16 (0) or MLA_DTYPE_F16 (1)")
        .that(p.rank >= kChunk && p.rank <= kMostRank && p.rank % kChunk == 0, "rank", p.rank,
              "a multiple of 64, to 2560")
        .that(along_rank || p.weights_column_stride == 1, "weights_column_stride",
              p.weights_column_stride, "1, or a weights_rank_stride of 1")
        .pointer(p.latent, 16, "latent")
        .pointer(p.query_weights, 16, "query_weights");
    const int64_t apart = along_rank ? p.weights_column_stride : p.weights_rank_stride;
    const char* name = along_rank ? "weights_column_stride" : "weights_rank_stride";
    check.stride(apart, name, along_rank ? p.rank : int64_t(q.heads) * kWidth)
        .that(apart % 8 == 0, name, apart, "a multiple of 8");
    if (q.tokens > 1)
        check.stride(p.latent_stride, "latent_stride", p.rank)
            .that(p.latent_stride % 8 == 0, "latent_stride", p.latent_stride, "a multiple of 8");
    quantise::check_queries(check, q);
    return check.status();
}

// A matrix of 16-bit elements, of which `columns` are neighbours.
MlaStatus describe(CUtensorMap& map, const void* base, int64_t columns, int64_t rows,
                   int64_t stride, int box_columns, int box_rows) {
    EncodeTiled encode;
    const MlaStatus s = encode_tiled(encode);
    if (s.code != MLA_OK) return s;
    const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(rows), 1};
    const cuuint64_t strides[2] = {cuuint64_t(stride) * 2, cuuint64_t(stride) * 2};
    const cuuint32_t boxes[3] = {cuuint32_t(box_columns), cuuint32_t(box_rows), 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult r =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(base), sizes, strides,
               boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return {MLA_CUDA_ERROR, int32_t(r), "cuTensorMapEncodeTiled", int64_t(r), "success"};
    return ok();
}

// As many CTAs for a head as leave none waiting for an SM, each with whole chunks.
int choose_splits(int heads, int chunks, int multiprocessors) {
    int splits = 1;
    while (splits < kMostSplits && heads * splits * 2 <= multiprocessors &&
           chunks % (splits * 2) == 0)
        splits *= 2;
    return splits;
}

template <typename T, bool kAlongRank>
MlaStatus launch(const KernelParams& p, int splits, void* stream) {
    const auto kernel = &project_kernel<T, kAlongRank>;
    const int bytes = Layout{p.stages, p.chunks}.bytes();
    const MlaStatus s = cuda_status(
        "cudaFuncSetAttribute",
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes));
    if (s.code != MLA_OK) return s;
    const int64_t blocks = ceil_div(p.queries.tokens, kTokens);
    const dim3 grid(unsigned(splits), unsigned(p.queries.heads), unsigned(blocks));
    return indexer::launch_early("index projection", kernel, {grid, kThreads, bytes, splits},
                                 stream, p);
}

MlaStatus launch(const MlaIndexProjectionParams& p, const MlaIndexQueriesParams& q,
                 int multiprocessors, void* stream) {
    const bool along_rank = p.weights_rank_stride == 1;
    const int64_t columns = int64_t(q.heads) * kWidth;
    const int splits = choose_splits(q.heads, p.rank / kChunk, multiprocessors);
    KernelParams k = {};
    k.queries = q;
    k.chunks = p.rank / kChunk / splits;
    const int room = (kMostBytes - Layout{0, k.chunks}.bytes()) / kWeightBytes;
    k.stages = std::min({k.chunks, kMostStages, room});
    MlaStatus s = along_rank ? describe(k.weights, p.query_weights, p.rank, columns,
                                        p.weights_column_stride, kChunk, kWidth)
                             : describe(k.weights, p.query_weights, columns, p.rank,
                                        p.weights_rank_stride, kWidth / kHalves, kChunk);
    if (s.code != MLA_OK) return s;
    // Of one token the stride is never used, but has to be one.
    const int64_t latent_stride = q.tokens > 1 ? p.latent_stride : p.rank;
    s = describe(k.latent, p.latent, p.rank, q.tokens, latent_stride, kChunk, kTokens);
    if (s.code != MLA_OK) return s;
    if (p.dtype == MLA_DTYPE_F16)
        return along_rank ? launch<__half, true>(k, splits, stream)
                          : launch<__half, false>(k, splits, stream);
    return along_rank ? launch<__nv_bfloat16, true>(k, splits, stream)
                      : launch<__nv_bfloat16, false>(k, splits, stream);
}

}  // namespace
}  // namespace mla::sm90::project

using namespace mla;

extern "C" MlaStatus mla_index_project_sm90(const MlaIndexProjectionParams* projection,
                                            const MlaIndexQueriesParams* queries, void* stream) {
    if (!projection) return refuse("projection", 0, "a pointer");
    if (!queries) return refuse("queries", 0, "a pointer");
    MlaStatus s = Check()
                      .that(queries->tokens >= 0 && queries->tokens <= 65535 * sm90::project::kTokens,
                            "tokens", queries->tokens, "0..=2097120")
                      .status();
    if (s.code != MLA_OK) return s;
    DeviceFacts facts;
    s = sm90_facts(facts);
    if (s.code != MLA_OK || queries->tokens == 0) return s;
    s = sm90::project::check(*projection, *queries);
    if (s.code != MLA_OK) return s;
    return sm90::project::launch(*projection, *queries, facts.multiprocessors, stream);
}
