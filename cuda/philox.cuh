// Philox4x32-10 and the words of stochastic rounding: the twin of cuflash/philox.py.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

__device__ __forceinline__ uint4 philox4x32(uint4 c, uint2 k) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        c = make_uint4(__umulhi(0xCD9E8D57u, c.z) ^ c.y ^ k.x, 0xCD9E8D57u * c.z,
                       __umulhi(0xD2511F53u, c.x) ^ c.w ^ k.y, 0xD2511F53u * c.x);
        k = make_uint2(k.x + 0x9E3779B9u, k.y + 0xBB67AE85u);
    }
    return c;
}

// The key of one site's words. seed: low word, high word. Once per (sample, head), not per element.
__device__ __forceinline__ uint2 subkey(uint2 seed, unsigned step, unsigned sample, unsigned layer,
                                        unsigned head, unsigned site) {
    const uint4 c = philox4x32(make_uint4(step, sample, layer << 16 | head, site), seed);
    return make_uint2(c.x, c.y);
}

// The words of columns 2t, 2t+1, 2t+8, 2t+9 of the 16 that hold col, t = (col % 8) / 2: a thread's
// share of an mma fragment.
__device__ __forceinline__ uint4 random_block(uint2 key, unsigned row, unsigned col, unsigned tile) {
    return philox4x32(make_uint4(col / 16 * 4 + col % 8 / 2, row, tile, 0), key);
}

// The word of one element.
__device__ __forceinline__ unsigned random_word(uint2 key, unsigned row, unsigned col, unsigned tile) {
    const uint4 c = random_block(key, row, col, tile);
    const unsigned even = col & 8 ? c.z : c.x, odd = col & 8 ? c.w : c.y;
    return col & 1 ? odd : even;
}
