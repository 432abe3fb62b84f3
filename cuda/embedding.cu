// Token and position embedding (cuflash/embedding.py): y[b, t] = wte[idx[b, t]] + wpe[t]. Rows of WIDTH
// elements.
//
// The token gradient without sorting and without atomics: each position points to the next one of its sample
// with the same token; the first of them sums dy along these pointers; a token then sums its samples,
// ascending. Compiled with WIDTH, WHOLE, and Y_T or DY_T.

#include "rows.cuh"

constexpr int tokens_at_once = 4096;  // positions in shared memory

#ifdef FORWARD
// A block takes a position of a sample.
extern "C" __global__ void embedding_forward(const int* idx, const float* wte, const float* wpe, Y_T* y,
                                             const Place place) {
    const long long row = blockIdx.x;
    const float* token = wte + (long long)idx[row] * WIDTH;
    const float* position = wpe + row % place.rows * WIDTH;
    for (int col = 4 * threadIdx.x; col < WIDTH; col += 4 * blockDim.x) {
        const float4 v = load4<WHOLE>(token, col, WIDTH) + load4<WHOLE>(position, col, WIDTH);
        store4<WHOLE>(y + row * WIDTH, col, WIDTH, rnd4<embed>(v, place.at(0, row, col)));
    }
}
#else

// next: (samples, T), the next position with the same token, or -1. first: (vocab_size, samples), a token's
// first position in each sample; filled with -1 before. A block takes a sample.
extern "C" __global__ void __launch_bounds__(1024)
    embedding_links(const int* all_idx, int* all_next, int* first, int length) {
    __shared__ int tokens[tokens_at_once];
    const int* idx = all_idx + (long long)blockIdx.x * length;
    int* next = all_next + (long long)blockIdx.x * length;
    for (int t0 = 0; t0 < length; t0 += 1024) {
        const int t = t0 + threadIdx.x, token = t < length ? idx[t] : -1;
        int found = -1;
        bool earlier = false;
        for (int start = 0; start < length; start += tokens_at_once) {
            __syncthreads();
            for (int i = threadIdx.x; i < tokens_at_once && start + i < length; i += 1024)
                tokens[i] = idx[start + i];
            __syncthreads();
            const int stop = length - start < tokens_at_once ? length - start : tokens_at_once;
            for (int u = 0; u < stop && found < 0 && token >= 0; u++) {
                if (tokens[u] != token) continue;
                if (start + u < t) earlier = true;
                if (start + u > t) found = start + u;
            }
        }
        if (t >= length) continue;
        next[t] = found;
        if (!earlier) first[(long long)token * gridDim.x + blockIdx.x] = t;
    }
}

// sums: like dy, fp32; rows of first positions are written. A block takes a position.
extern "C" __global__ void embedding_sums(const int* idx, const int* next, const int* first, const DY_T* dy,
                                          float* sums, int length, int samples) {
    const int row = blockIdx.x, sample = row / length, t = row % length;
    if (first[(long long)idx[row] * samples + sample] != t) return;
    const int* link = next + (long long)sample * length;
    dy += (long long)sample * length * WIDTH;
    for (int col = 4 * threadIdx.x; col < WIDTH; col += 4 * blockDim.x) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int u = t; u >= 0; u = link[u])
            total = total + load4<WHOLE>(dy + (long long)u * WIDTH, col, WIDTH);
        store4<WHOLE>(sums + (long long)row * WIDTH, col, WIDTH, total);
    }
}

// A warp takes a token.
extern "C" __global__ void __launch_bounds__(256)
    embedding_tokens(const int* first, const float* sums, float* dwte, int length, int samples,
                     int vocab_size) {
    const int token = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= vocab_size) return;
    const int* of_token = first + (long long)token * samples;
    for (int col = 4 * lane; col < (WIDTH + 127) / 128 * 128; col += 128) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int start = 0; start < samples; start += 32) {
            const int mine = start + lane < samples ? of_token[start + lane] : -1;
            for (unsigned left = __ballot_sync(0xFFFFFFFFu, mine >= 0); left; left &= left - 1) {
                const int bit = __ffs(left) - 1;
                const long long row = (long long)(start + bit) * length + __shfl_sync(0xFFFFFFFFu, mine, bit);
                total = total + load4<WHOLE>(sums + row * WIDTH, col, WIDTH);
            }
        }
        store4<WHOLE>(dwte + (long long)token * WIDTH, col, WIDTH, total);
    }
}

// dwpe: (block_size, WIDTH); rows from `length` on become zero. A block takes a position.
extern "C" __global__ void embedding_positions(const DY_T* dy, float* dwpe, int length, int samples) {
    const int t = blockIdx.x;
    for (int col = 4 * threadIdx.x; col < WIDTH; col += 4 * blockDim.x) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        if (t < length)
#pragma unroll 8
            for (int b = 0; b < samples; b++)
                total = total + load4<WHOLE>(dy + ((long long)b * length + t) * WIDTH, col, WIDTH);
        store4<WHOLE>(dwpe + (long long)t * WIDTH, col, WIDTH, total);
    }
}
#endif
