// The global gradient norm and what follows from it (cuflash/grad_norm.py), of squares that block_sums has
// summed. Compiled with THREADS.

#include "reduce.cuh"
#include "rows.cuh"

// norm: √Σ. clip: min(1, grad_clip / (norm + 1e-6)), 1 where grad_clip is 0. losses: of the step's `micro`
// micro-batches. failed: set to *step, unless it is set, where the norm or a loss is not finite.
extern "C" __global__ void __launch_bounds__(THREADS)
    grad_norm(const float* sums, long long n, double grad_clip, float* norm, float* clip, const float* losses,
              int micro, int* failed, const int* step) {
    __shared__ float shared[32];
    Sums mine;
    for (long long i = 4 * threadIdx.x; i < n; i += 4 * THREADS) mine.add(load4_flat(sums, i, n));
    const float total = sqrtf(block_sum<THREADS>(mine.joined(), shared));
    if (threadIdx.x) return;
    const double factor = grad_clip / ((double)total + 1e-6);
    *norm = total;
    *clip = grad_clip > 0 && factor < 1 ? (float)factor : 1.f;
    bool finite = isfinite(total);
    for (int i = 0; i < micro; i++) finite &= isfinite(losses[i]);
    if (!finite && *failed == 0) *failed = *step;
}
