// Launches of clusters of CTAs. Such a launch may start while the previous kernel of the stream is
// ending (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

namespace mla {

// Attributes that the configuration of such a launch points to.
using ClusterAttributes = cudaLaunchAttribute[2];

// Configuration of a launch of `ctas` CTAs, in clusters of `cluster` along x.
inline cudaLaunchConfig_t early_clusters(int ctas, int cluster, int threads, size_t shared_bytes,
                                         cudaStream_t stream, ClusterAttributes& attributes) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = unsigned(cluster);
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = {unsigned(ctas), 1, 1};
    config.blockDim = {unsigned(threads), 1, 1};
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return config;
}

}  // namespace mla
