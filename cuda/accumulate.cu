// Gradients over micro-batches (cuflash/accumulate.py): total = g, or total + g. Compiled with ADD, G_T.

#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(256) accumulate(float* total, const G_T* g, long long size) {
    FOR_BLOCKS(size) {
        float4 v[thread_fours];
        FOR_FOURS(j, i)
            v[j] = ADD ? load4_flat(total, i, size) + load4_flat(g, i, size) : load4_flat(g, i, size);
        FOR_FOURS(j, i) store4_flat(total, i, size, v[j]);
    }
}
