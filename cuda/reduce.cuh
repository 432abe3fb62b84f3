// Sums outside attention, in the order of cuflash/reduce.py.
#pragma once

// A thread's four sums of a row: element i of the row goes to sum i mod 4 · threads.
struct Sums {
    float s0 = 0.f, s1 = 0.f, s2 = 0.f, s3 = 0.f;

    void add(float4 x) { s0 += x.x, s1 += x.y, s2 += x.z, s3 += x.w; }
    float joined() const { return (s0 + s1) + (s2 + s3); }
};

// The sum over a warp: (i, i + 16), (i, i + 8), …, (i, i + 1). In every lane.
inline float warp_sum(float x) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, apart);
    return x;
}

// The sum over a block: within each warp, then over the warps likewise. In every thread. `shared` holds a
// float a warp; it may be used again after the next barrier.
template <int Threads>
inline float block_sum(float x, float* shared) {
    constexpr int warps = Threads / 32;
    x = warp_sum(x);
    if constexpr (warps > 1) {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
        __syncthreads();
        x = shared[threadIdx.x % warps];
#pragma unroll
        for (int apart = warps / 2; apart; apart /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, apart);
    }
    return x;
}
