// dK or dV of a key/value head: the sum of its query heads' shares, heads ascending, rounded and returned.
//
// Compiled with OUT, the result's type, and the site as ROUNDED.

#include "attention_backward.cuh"

// shares: (batch · heads, T, D). listed: the first query head of each group, or null for all groups.
extern "C" __global__ void attention_heads(const float* shares, Array<void> out, long long count,
                                           const Args args) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
         i += (long long)gridDim.x * blockDim.x) {
        const int col = int(i % args.d);
        const long long line = i / args.d;
        const int row = int(line % args.tk);
        const int pair = int(line / args.tk), sample = pair / args.listed;
        const int head = args.heads ? args.heads[pair % args.listed] : pair % args.listed * args.group;
        const long long size = (long long)args.tk * args.d;
        const float* from =
            shares + ((long long)sample * args.n_heads + head) * size + (long long)row * args.d + col;
        float total = from[0];
        for (int share = 1; share < args.group; share++) total += from[share * size];
        At at{};
        at.seed = make_uint2(args.seed_low, args.seed_high);
        at.step = args.step, at.layer = args.layer, at.sample = args.sample + sample, at.head = head;
        OUT* to =
            static_cast<OUT*>(out.data) + sample * out.batch + head / args.group * out.head + row * out.row;
        store(to + col, rnd<ROUNDED>(total, at(row, col)));
    }
}
