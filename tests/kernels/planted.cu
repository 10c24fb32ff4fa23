// Kernels for tests of the emulator: what CUDA defines, and planted faults. Tests know lines by @words.
#include "device.cuh"

__global__ void exchanges(int* out) {
    const int i = threadIdx.x;
    out[i] = __shfl_xor_sync(ALL_LANES, i, 5);
    out[64 + i] = __shfl_sync(ALL_LANES, i, 7);
    out[128 + i] = __shfl_down_sync(ALL_LANES, i, 3);
    out[192 + i] = __shfl_up_sync(ALL_LANES, i, 3);
    out[256 + i] = __shfl_sync(ALL_LANES, i, 2, 8);
    out[320 + i] = int(__ballot_sync(ALL_LANES, i % 3 == 0));
    out[384 + i] = __any_sync(ALL_LANES, i == 40) * 2 + __all_sync(ALL_LANES, i < 32);
}
template <class T> __global__ void narrowed(const float* x, T* y) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[i] = narrow<T>(x[i]);
}
template <class T> __global__ void widened(const T* x, float* y) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[i] = wide(x[i]);
}
__global__ void upper_halves(const uint64_t* x, uint64_t* y) {
    y[threadIdx.x] = __umul64hi(x[threadIdx.x], x[64 + threadIdx.x]);
}
__global__ void atomics(float* sum, int* largest) {
    atomicAdd(sum, float(threadIdx.x));
    atomicMax(largest, int(threadIdx.x * blockIdx.x));
}
__global__ void three_dims(int* out) {
    const int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    out[b * blockDim.x + threadIdx.x] = b * 100 + threadIdx.x;
}
__global__ void all_types(int a, const float* p, float b, int64_t c, uint32_t d, uint64_t e, double* out) {
    const double all[] = {double(a), *p, b, double(c), double(d), double(e)};
    if (threadIdx.x < 6) out[threadIdx.x] = all[threadIdx.x];
}

// ---- faults that the emulator finds

__global__ void half_a_warp_in_a_shuffle(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x % 32 < 16) v = __shfl_xor_sync(ALL_LANES, v, 1);    // @shuffle
    x[threadIdx.x] = v;
}
__global__ void mask_of_half_a_warp(float* x) {
    x[threadIdx.x] = __shfl_xor_sync(0xffffu, x[threadIdx.x], 1);       // @mask
}
__global__ void barrier_after_some_returned(float* x) {
    if (threadIdx.x >= 40) return;
    __syncthreads();                                                    // @barrier
    x[threadIdx.x] = 1;
}
__global__ void barriers_in_two_branches(float* x) {
    if (threadIdx.x < 32)
        __syncthreads();                                                // @first
    else
        __syncthreads();                                                // @second
    x[threadIdx.x] = 1;
}
__global__ void shared_memory_not_written(float* x) {
    __shared__ float s[64];
    if (threadIdx.x < 63) s[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}
__global__ void missing_barrier(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = threadIdx.x;                                       // @written
    x[threadIdx.x] = s[63 - threadIdx.x];                               // @read
}

// ---- faults that sanitizers find

__global__ void blocks_that_share_an_address(float* x) {
    if (threadIdx.x == 0) x[0] = x[0] * 2 + blockIdx.x;                 // @blocks
}
__global__ void misaligned_packet(float* x) {
    if (threadIdx.x == 0) store(x + 4, load(x + 1));
}
__global__ void shared_memory_overrun(float* x) {
    __shared__ float s[64];
    s[threadIdx.x + 1] = 1;                                             // @shared
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}
__global__ void tensor_overrun(float* x) {
    x[threadIdx.x + 1] = 1;                                             // @tensor
}
__global__ void two_reductions(float* x) {
    const float first = over_block<Sum, 64>(x[threadIdx.x]);
    x[threadIdx.x] = first + over_block<Sum, 64>(x[threadIdx.x]);
}
