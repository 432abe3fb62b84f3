// Sums outside attention (cuflash/reduce.py).

#include "reduce.cuh"
#include "rows.cuh"

// Sums of each 8192 elements; SQUARES: of their squares.
#ifdef BLOCK_SUMS
extern "C" __global__ void __launch_bounds__(256) block_sums(const float* x, float* sums, long long size) {
    __shared__ float shared[32];
    float4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = load4_flat(x, blockIdx.x * 8192LL + 1024 * j + 4 * threadIdx.x, size);
    Sums mine;
#pragma unroll
    for (int j = 0; j < 8; j++) mine.add(SQUARES ? v[j] * v[j] : v[j]);
    const float sum = block_sum<256>(mine.joined(), shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
#endif

// The sum of a row of n, by one block, over a divisor.
#ifdef ROW_SUM
extern "C" __global__ void __launch_bounds__(THREADS)
    row_sum(const float* x, float* sum, long long n, float divisor) {
    __shared__ float shared[32];
    Sums mine;
    for (long long i = 4 * threadIdx.x; i < n; i += 4 * THREADS) mine.add(load4_flat(x, i, n));
    const float total = block_sum<THREADS>(mine.joined(), shared);
    if (threadIdx.x == 0) *sum = total / divisor;
}
#endif

// Sums of columns over 16 rows each: (rows, columns) -> (chunks, columns). A thread takes four columns of a
// chunk. WHOLE: columns and row starts are multiples of four.
#ifdef COLUMN_CHUNKS
extern "C" __global__ void __launch_bounds__(256)
    column_chunks(const X_T* x, float* sums, long long rows, long long stride, int columns, long long count) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= count) return;
    const int fours = (columns + 3) / 4, col = int(i % fours) * 4;
    const long long chunk = i / fours;
    float4 v[16], total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const long long row = chunk * 16 + j;
        v[j] = load4<WHOLE>(x + row * stride, col, row < rows ? columns : 0);
    }
#pragma unroll
    for (int j = 0; j < 16; j++) total = total + v[j];
    store4<WHOLE>(sums + chunk * columns, col, columns, total);
}
#endif

// The chunks' sums, joined: (chunks, columns) -> (columns), rounded. A block takes 32 columns.
#ifdef COLUMN_JOIN
extern "C" __global__ void __launch_bounds__(1024)
    column_join(const float* sums, Y_T* y, int chunks, int columns, const Place place) {
    __shared__ float shared[32][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int col = blockIdx.x * 32 + lane;
    float total = 0.f;
    if (col < columns)
#pragma unroll 8
        for (long long chunk = warp; chunk < chunks; chunk += 32) total += sums[chunk * columns + col];
    shared[warp][lane] = total;
    __syncthreads();
    total = warp_sum(shared[lane][warp]);
    const int mine = blockIdx.x * 32 + warp;
    if (lane == 0 && mine < columns) store(y + mine, rnd<ROUNDED>(total, place.at(0, 0, mine)));
}
#endif
