// The C interface over cuDNN's frontend. Nothing that it throws leaves a function.
#include "cudnn_shim.h"

#include <dlfcn.h>

#include <cudnn_frontend.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace fe = cudnn_frontend;

// What the frontend finds cuDNN's functions in.
void* fe::cudnn_dlhandle = nullptr;

namespace {

std::string& last_error() {
    thread_local std::string text;
    return text;
}

template <typename Work>
int32_t guarded(Work&& work) noexcept {
    try {
        work();
        return 0;
    } catch (const std::exception& error) {
        last_error() = error.what();
    } catch (...) {
        last_error() = "an exception that is no std::exception";
    }
    return -1;
}

void check(fe::error_t error, const char* step) {
    if (error.is_bad()) throw std::runtime_error(std::string(step) + ": " + error.get_message());
}

void check(cudnnStatus_t status, const char* step) {
    if (status != CUDNN_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(step) + ": " + fe::detail::get_error_string(status));
    }
}

// The names of a plan's tensors, by which a run gives their addresses.
enum Uid : int64_t {
    kQuery = 1,
    kKey,
    kValue,
    kOut,
    kLse,
    kQueryLens,
    kKeyLens,
    kQueryOffsets,
    kKeyOffsets,
    kValueOffsets,
    kOutOffsets,
    kLseOffsets,
};

struct Plan {
    fe::graph::Graph graph;
    bool has_lse = false, is_ragged = true;
};

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// Describes the attention of a key to cuDNN. Tensors are (requests, heads, length, dim).
class Description {
  public:
    Description(fe::graph::Graph& graph, const McKey& key) : graph_(graph), key_(key) {}

    void describe() {
        graph_.set_io_data_type(key_.dtype == 0 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        const int64_t queries = key_.max_query_len, keys = key_.max_key_len;
        const Tensor query =
            input(kQuery, "query", dims(queries, key_.key_dim), key_.query_token_stride,
                  key_.query_head_stride, offsets(kQueryOffsets, "query_offsets"));
        const Tensor keys_in = input(kKey, "key", dims(keys, key_.key_dim), key_.key_token_stride,
                                     key_.key_head_stride, offsets(kKeyOffsets, "key_offsets"));
        const Tensor values =
            input(kValue, "value", dims(keys, key_.value_dim), key_.value_token_stride,
                  key_.value_head_stride, offsets(kValueOffsets, "value_offsets"));
        auto [out, lse] = graph_.sdpa(query, keys_in, values, attention());
        describe_out(*out);
        if (key_.lse_head_stride != 0) describe_lse(*lse);
    }

  private:
    using Extents = std::vector<int64_t>;

    Extents dims(int64_t length, int64_t dim) const {
        return {key_.requests, key_.heads, length, dim};
    }

    // Of a ragged tensor the stride between requests is not used; of equal requests it says where
    // each begins, for which cuDNN has a faster kernel.
    static Extents strides(int64_t length, int64_t token, int64_t head) {
        return {length * token, head, token, 1};
    }

    Tensor integers(Uid uid, const char* name, int64_t count) {
        return graph_.tensor(fe::graph::Tensor_attributes()
                                 .set_name(name)
                                 .set_uid(uid)
                                 .set_dim({count, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1})
                                 .set_data_type(fe::DataType_t::INT32));
    }

    // Null of equal requests, whose tensors need none.
    Tensor offsets(Uid uid, const char* name) {
        return key_.equal ? nullptr : integers(uid, name, key_.requests + 1);
    }

    Tensor input(Uid uid, const char* name, const Extents& dims, int64_t token, int64_t head,
                 const Tensor& begin) {
        auto tensor = fe::graph::Tensor_attributes();
        tensor.set_name(name).set_uid(uid).set_dim(dims).set_stride(strides(dims[2], token, head));
        if (begin) tensor.set_ragged_offset(begin);
        return graph_.tensor(tensor);
    }

    fe::graph::SDPA_attributes attention() {
        auto attention = fe::graph::SDPA_attributes()
                             .set_name("attention")
                             .set_attn_scale(key_.softmax_scale)
                             .set_generate_stats(key_.lse_head_stride != 0);
        if (!key_.equal) {
            attention.set_padding_mask(true)
                .set_seq_len_q(integers(kQueryLens, "query_lens", key_.requests))
                .set_seq_len_kv(integers(kKeyLens, "key_lens", key_.requests));
        }
        if (key_.causal) {
            // The frontend's own default is aligned to the top left.
            attention.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT)
                .set_diagonal_band_right_bound(0);
        }
        return attention;
    }

    void describe_out(fe::graph::Tensor_attributes& out) {
        const int64_t queries = key_.max_query_len;
        out.set_output(true)
            .set_uid(kOut)
            .set_dim(dims(queries, key_.value_dim))
            .set_stride(strides(queries, key_.out_token_stride, key_.out_head_stride));
        if (!key_.equal) out.set_ragged_offset(offsets(kOutOffsets, "out_offsets"));
    }

    void describe_lse(fe::graph::Tensor_attributes& lse) {
        const int64_t queries = key_.max_query_len, head = key_.lse_head_stride;
        lse.set_output(true)
            .set_uid(kLse)
            .set_data_type(fe::DataType_t::FLOAT)
            .set_dim(dims(queries, 1))
            .set_stride({key_.equal ? queries : key_.heads * head, head, 1, 1});
        if (!key_.equal) lse.set_ragged_offset(offsets(kLseOffsets, "lse_offsets"));
    }

    fe::graph::Graph& graph_;
    const McKey& key_;
};

void build(Plan& plan, cudnnHandle_t handle, const McKey& key) {
    plan.has_lse = key.lse_head_stride != 0;
    plan.is_ragged = key.equal == 0;
    auto& graph = plan.graph;
    Description(graph, key).describe();
    check(graph.validate(), "validate");
    check(graph.build_operation_graph(handle), "build operation graph");
    check(graph.create_execution_plans({fe::HeurMode_t::A}), "create execution plans");
    check(graph.check_support(handle), "check support");
    check(graph.build_plans(handle), "build plans");
}

}  // namespace

extern "C" const char* mc_last_error(void) { return last_error().c_str(); }

extern "C" int32_t mc_open(const char* library, int32_t* version) {
    return guarded([&] {
        if (fe::cudnn_dlhandle == nullptr) {
            fe::cudnn_dlhandle = dlopen(library ? library : "libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
            if (fe::cudnn_dlhandle == nullptr) throw std::runtime_error(dlerror());
        }
        *version = static_cast<int32_t>(fe::detail::get_backend_version());
    });
}

extern "C" int32_t mc_handle_new(void** handle) {
    return guarded([&] {
        cudnnHandle_t made = nullptr;
        check(fe::detail::create_handle(&made), "create a handle");
        *handle = made;
    });
}

extern "C" void mc_handle_free(void* handle) {
    guarded([&] { fe::detail::destroy_handle(static_cast<cudnnHandle_t>(handle)); });
}

extern "C" int32_t mc_plan_new(void* handle, const McKey* key, void** plan,
                               int64_t* workspace_bytes) {
    return guarded([&] {
        auto made = std::make_unique<Plan>();
        build(*made, static_cast<cudnnHandle_t>(handle), *key);
        check(made->graph.get_workspace_size(*workspace_bytes), "workspace");
        *plan = made.release();
    });
}

extern "C" void mc_plan_free(void* plan) {
    guarded([&] { delete static_cast<Plan*>(plan); });
}

extern "C" int32_t mc_run(void* handle, void* plan, const McRun* run, void* stream) {
    return guarded([&] {
        const auto& made = *static_cast<const Plan*>(plan);
        const auto on = static_cast<cudnnHandle_t>(handle);
        check(fe::detail::set_stream(on, static_cast<cudaStream_t>(stream)), "set stream");
        const auto address = [](const void* pointer) { return const_cast<void*>(pointer); };
        std::unordered_map<int64_t, void*> tensors = {
            {kQuery, address(run->query)},
            {kKey, address(run->key)},
            {kValue, address(run->value)},
            {kOut, run->out},
        };
        if (made.has_lse) tensors.emplace(kLse, run->lse);
        if (made.is_ragged) {
            tensors.emplace(kQueryLens, address(run->query_lens));
            tensors.emplace(kKeyLens, address(run->key_lens));
            tensors.emplace(kQueryOffsets, address(run->query_offsets));
            tensors.emplace(kKeyOffsets, address(run->key_offsets));
            tensors.emplace(kValueOffsets, address(run->value_offsets));
            tensors.emplace(kOutOffsets, address(run->out_offsets));
            if (made.has_lse) tensors.emplace(kLseOffsets, address(run->lse_offsets));
        }
        check(made.graph.execute(on, tensors, run->workspace), "execute");
    });
}
