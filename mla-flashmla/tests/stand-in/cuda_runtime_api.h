// The names of CUDA's runtime that the shim and its guard use.
#pragma once

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = struct CUstream_st*;

inline int pending_errors = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }
inline cudaError_t cudaGetLastError() { return pending_errors = 0, cudaSuccess; }
