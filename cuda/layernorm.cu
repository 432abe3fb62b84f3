// LayerNorm, forward and backward, of rows of WIDTH elements (cuflash/layernorm.py):
//   mean = Σx / WIDTH,  d = x − mean,  rstd = 1/√(Σd² / WIDTH + ε),  x̂ = d · rstd,  y = x̂ · w (+ b)
//   g = dy · w,  dx = ((g − Σg / WIDTH) − x̂ · (Σ g·x̂ / WIDTH)) · rstd,  dw = Σ dy · x̂,  db = Σ dy
//
// A block of THREADS threads takes a row at a time and keeps it in registers. Fused, with each site as it is:
//   RESIDUAL: forward first adds a branch to the stream (residual.y), backward last adds the stream's
//     gradient (residual.dx);
//   OPERAND: the linear layer that takes y, or dx, gets it rounded at its linear.x, or linear.dy.
//
// Compiled with WIDTH, THREADS, WHOLE (WIDTH % 4 == 0, rows aligned), BIAS, RESIDUAL, OPERAND, and the types
// of arrays (X_T …).

#include "functions.cuh"
#include "reduce.cuh"
#include "rows.cuh"

constexpr int fours = (WIDTH + 4 * THREADS - 1) / (4 * THREADS);  // a thread's share of a row
constexpr bool even = WIDTH % (4 * THREADS) == 0;  // no thread is past the end

#define FOR_COLUMNS(i, col) \
    _Pragma("unroll") for (int i = 0, col = 4 * threadIdx.x; i < fours; i++, col += 4 * THREADS)

// Elements past the end count for nothing.
inline float4 masked(float4 x, int col) {
    if constexpr (!even) {
        if (col >= WIDTH) x.x = 0.f;
        if (col + 1 >= WIDTH) x.y = 0.f;
        if (col + 2 >= WIDTH) x.z = 0.f;
        if (col + 3 >= WIDTH) x.w = 0.f;
    }
    return x;
}

template <class T>
inline float4 load(const T* row, int col) {
    return load4<WHOLE>(row, col, even ? WIDTH + col : WIDTH);
}

template <class T>
inline void save(T* row, int col, float4 x) {
    store4<WHOLE>(row, col, even ? WIDTH + col : WIDTH, x);
}

// A sum over the row, of every thread's share.
inline float row_sum(const float4 (&x)[fours], float* shared) {
    Sums sums;
#pragma unroll
    for (int i = 0; i < fours; i++) sums.add(x[i]);
    return block_sum<THREADS>(sums.joined(), shared);
}

#ifdef FORWARD
// x: (rows, WIDTH). stream: x plus branch, for RESIDUAL. statistics: mean and rstd of each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    layernorm_forward(const X_T* x, const BRANCH_T* branch, STREAM_T* stream, const float* w, const float* b,
                      Y_T* y, float2* statistics, long long rows, const Place place) {
    __shared__ float shared[2][32];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        float4 v[fours], square[fours];
        FOR_COLUMNS(i, col) {
            v[i] = load(x + row * WIDTH, col);
#if RESIDUAL
            v[i] =
                masked(rnd4<residual_y>(v[i] + load(branch + row * WIDTH, col), place.at(0, row, col)), col);
            save(stream + row * WIDTH, col, v[i]);
#endif
        }
        const float mean = row_sum(v, shared[0]) / float(WIDTH);
        FOR_COLUMNS(i, col) {
            v[i] = masked(v[i] - mean, col);
            square[i] = v[i] * v[i];
        }
        const float rstd = rsqrt_defined(row_sum(square, shared[1]) / float(WIDTH) + 1e-5f);
        FOR_COLUMNS(i, col) {
            v[i] = v[i] * rstd * load(w, col);
            if constexpr (BIAS) v[i] = v[i] + load(b, col);
            v[i] = rnd4<ln_y>(v[i], place.at(1, row, col));
#if OPERAND
            v[i] = rnd4<linear_x>(v[i], place.at(2, row, col));
#endif
            save(y + row * WIDTH, col, v[i]);
        }
        if (threadIdx.x == 0) statistics[row] = make_float2(mean, rstd);
    }
}
#else
constexpr int chunk_rows = 16;
// Threads of an SM at once, as registers allow for.
constexpr int resident = fours <= 6 ? 512 : 320;

// x: what the forward normalised. dstream: the stream's gradient, for RESIDUAL. dw and db: (chunks, WIDTH),
// sums over 16 rows each, which the kernel of column sums joins. A block takes a chunk.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS < resident ? resident / THREADS : 1)
    layernorm_backward(const DY_T* dy, const X_T* x, const float2* statistics, const float* w,
                       const DSTREAM_T* dstream, DX_T* dx, DOPERAND_T* operand, float* dw, float* db,
                       long long rows, const Place place) {
    __shared__ float shared[2][32];
    float4 dw_sum[fours], db_sum[fours];
#pragma unroll
    for (int i = 0; i < fours; i++) dw_sum[i] = db_sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);

    for (int n = 0; n < chunk_rows; n++) {
        const long long row = blockIdx.x * (long long)chunk_rows + n;
        if (row >= rows) break;
        const float2 mean_rstd = statistics[row];
        float4 xhat[fours], g[fours], product[fours];
#if RESIDUAL && !BIAS
        float4 stream[fours];  // early, so that enough loads are under way; with a bias registers are short
        FOR_COLUMNS(i, col) stream[i] = load(dstream + row * WIDTH, col);
#define STREAM(i, col) stream[i]
#else
#define STREAM(i, col) load(dstream + row * WIDTH, col)
#endif
        FOR_COLUMNS(i, col) {
            xhat[i] = masked((load(x + row * WIDTH, col) - mean_rstd.x) * mean_rstd.y, col);
            const float4 dy_here = load(dy + row * WIDTH, col);
            g[i] = dy_here * load(w, col);
            product[i] = g[i] * xhat[i];
            dw_sum[i] = dw_sum[i] + dy_here * xhat[i];
            if constexpr (BIAS) db_sum[i] = db_sum[i] + dy_here;
        }
        const float g_mean = row_sum(g, shared[0]) / float(WIDTH);
        const float product_mean = row_sum(product, shared[1]) / float(WIDTH);
        FOR_COLUMNS(i, col) {
            float4 d = ((g[i] - g_mean) - xhat[i] * product_mean) * mean_rstd.y;
            d = rnd4<ln_dx>(d, place.at(0, row, col));
#if RESIDUAL
            d = rnd4<residual_dx>(STREAM(i, col) + d, place.at(1, row, col));
#endif
            save(dx + row * WIDTH, col, d);
#if OPERAND
            save(operand + row * WIDTH, col, rnd4<linear_dy>(d, place.at(2, row, col)));
#endif
        }
    }
    FOR_COLUMNS(i, col) {
        save(dw + (long long)blockIdx.x * WIDTH, col, dw_sum[i]);
        if constexpr (BIAS) save(db + (long long)blockIdx.x * WIDTH, col, db_sum[i]);
    }
}
#endif
