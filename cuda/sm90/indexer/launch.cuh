// Launches of the indexer's kernels, each of which may start while the previous kernel of the
// stream is ending (programmatic dependent launch).
#pragma once

#include "../../common/status.cuh"

namespace mla::sm90::indexer {

struct Grid {
    dim3 ctas;
    int threads;
    int shared_bytes = 0;
    int cluster = 1;  // CTAs of a cluster, along x
};

// The kernel has to call griddepcontrol.wait before it reads what other kernels write, and before
// it writes what they use.
template <typename... Parameters, typename... Arguments>
MlaStatus launch_early(const char* name, void (*kernel)(Parameters...), const Grid& grid,
                       void* stream, Arguments&&... arguments) {
    cudaLaunchAttribute attributes[3] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    // An SM can hold CTAs of the previous kernel and of this one at the same time only if both have
    // the same shared-memory carveout.
    attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    attributes[2].id = cudaLaunchAttributeClusterDimension;
    attributes[2].val.clusterDim.x = unsigned(grid.cluster);
    attributes[2].val.clusterDim.y = 1;
    attributes[2].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid.ctas;
    config.blockDim = dim3(unsigned(grid.threads));
    config.dynamicSmemBytes = size_t(grid.shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = grid.cluster > 1 ? 3 : 2;
    return cuda_status(name,
                       cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace mla::sm90::indexer
