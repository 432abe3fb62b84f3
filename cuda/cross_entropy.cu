// Softmax cross-entropy of rows of WIDTH logits (cuflash/cross_entropy.py):
//   m = max z,  e = exp(z − m),  l = Σe,  loss = log l − (z[target] − m),
//   dz = e · (scale / l) − scale · [column = target]
//
// A block of THREADS threads takes a row. STAGED: it is read from memory once, to shared memory, for the
// maximum, the sum and the gradient; softmax is never stored. LOSS, GRADIENT: which of them; the gradient
// alone takes m and l from `saved`. dz may be the array of logits. Compiled with these, ALIGNED (rows start
// at multiples of 16 bytes), Z_T, DZ_T.

#include "copy.cuh"
#include "functions.cuh"
#include "reduce.cuh"
#include "rows.cuh"

constexpr int whole_width = WIDTH / 4 * 4;
constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

#define FOR_COLUMNS(col) _Pragma("unroll 4") for (int col = 4 * threadIdx.x; col < WIDTH; col += 4 * THREADS)

// The row to shared memory, with −Inf after it.
inline void stage(Z_T* to, const Z_T* z) {
    if constexpr (ALIGNED) {  // the last 16 bytes may reach into what pads the row
        constexpr int elements = 16 / sizeof(Z_T);
        for (int i = elements * threadIdx.x; i < WIDTH; i += elements * THREADS)
            copy16_async(shared_address(to + i), z + i);
        copy_commit();
        copy_wait<0>();
    } else {
        for (int i = threadIdx.x; i < WIDTH; i += THREADS) to[i] = z[i];
    }
    __syncthreads();
    if (WIDTH % 4 && threadIdx.x < 4 - WIDTH % 4) store(to + WIDTH + threadIdx.x, -infinity);
    if (WIDTH % 4) __syncthreads();
}

inline float4 logits(const Z_T* z, int col) {
    if constexpr (STAGED) return load_four(z + col);
    if (ALIGNED && col < whole_width) return load_four(z + col);
    return make_float4(value(z[col]), col + 1 < WIDTH ? value(z[col + 1]) : -infinity,
                       col + 2 < WIDTH ? value(z[col + 2]) : -infinity,
                       col + 3 < WIDTH ? value(z[col + 3]) : -infinity);
}

inline float4 exp4(float4 x) {
    return make_float4(exp_defined<true>(x.x), exp_defined<true>(x.y), exp_defined<true>(x.z),
                       exp_defined<true>(x.w));
}

inline float block_max(float x, float* shared) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x = functions::max_nan(x, __shfl_xor_sync(0xFFFFFFFFu, x, apart));
    if constexpr (THREADS > 32) {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
        __syncthreads();
        x = shared[threadIdx.x % (THREADS / 32)];
#pragma unroll
        for (int apart = THREADS / 64; apart; apart /= 2)
            x = functions::max_nan(x, __shfl_xor_sync(0xFFFFFFFFu, x, apart));
    }
    return x;
}

// targets: (rows). losses: (rows). saved: m and l of each row. scale: of the gradient.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 1024 ? 2 : 1)
    cross_entropy(const Z_T* all_z, long long z_stride, const int* targets, float* losses, float2* saved,
                  DZ_T* all_dz, long long dz_stride, float scale, const Place place) {
    extern __shared__ uint4 staged[];
    __shared__ float shared[2][32];
    const long long row = blockIdx.x;
    const Z_T* z = all_z + row * z_stride;
    const int target = targets[row];
    float m, l;
    if constexpr (STAGED) {
        stage(reinterpret_cast<Z_T*>(staged), z);
        z = reinterpret_cast<Z_T*>(staged);
    }
    if constexpr (LOSS) {
        m = -infinity;
        FOR_COLUMNS(col) {
            const float4 x = logits(z, col);
            m = functions::max_nan(
                m, functions::max_nan(functions::max_nan(x.x, x.y), functions::max_nan(x.z, x.w)));
        }
        m = block_max(m, shared[0]);
        const float at_target = value(z[target]) - m;
        Sums sums;
        FOR_COLUMNS(col) sums.add(exp4(logits(z, col) - m));
        l = block_sum<THREADS>(sums.joined(), shared[1]);
        if (threadIdx.x == 0) {
            losses[row] = log_defined(l) - at_target;
            saved[row] = make_float2(m, l);
        }
    } else {
        m = saved[row].x, l = saved[row].y;
    }
    if constexpr (GRADIENT) {
        const float factor = scale / l;
        DZ_T* dz = all_dz + row * dz_stride;
        FOR_COLUMNS(col) {
            float4 d = exp4(logits(z, col) - m) * factor;
            if (unsigned(target - col) < 4u) {
                if (target == col) d.x -= scale;
                if (target == col + 1) d.y -= scale;
                if (target == col + 2) d.z -= scale;
                if (target == col + 3) d.w -= scale;
            }
            d = rnd4<loss_dlogits>(d, place.at(0, row, col));
            if (ALIGNED && col < whole_width)
                store_four(dz + col, d);
            else
                store4<false>(dz, col, WIDTH, d);
        }
    }
}
