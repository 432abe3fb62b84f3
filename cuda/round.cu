// y = rnd(x) at a site, where no kernel before could do it. Compiled with ROUNDED, X_T, Y_T.

#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
    round_site(const X_T* x, Y_T* y, long long size, const Place place) {
    FOR_BLOCKS(size) {
        float4 v[thread_fours];
        FOR_FOURS(j, i) v[j] = load4_flat(x, i, size);
        FOR_FOURS(j, i) store4_flat(y, i, size, rnd4<ROUNDED>(v[j], place, 0, i));
    }
}
