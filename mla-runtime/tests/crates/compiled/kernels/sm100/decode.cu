extern "C" __global__ void decode() {}
