// An operand of attention's backward made ready: y = rnd(x), laid out (pairs, T, width), zeros from D on.
//
// Only for inputs that cannot be read where they lie: of another dtype, unaligned, or changed by their site.
// Compiled with IN, OUT (float, bf16, fp16) and the site as ROUNDED.

#include "attention_backward.cuh"

// per_kv: x has key/value heads. per_head: y is laid out by query head all the same, as random words ask.
extern "C" __global__ void attention_operand(Array<const void> x, OUT* y, int rows, int width, int per_kv,
                                             int per_head, long long count, const Args args) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
         i += (long long)gridDim.x * blockDim.x) {
        const int col = int(i % width);
        const long long line = i / width;
        const int row = int(line % rows);
        const int pair = int(line / rows);
        const int heads = per_kv && !per_head ? args.n_heads / args.group : args.n_heads;
        const int sample = pair / heads, head = pair % heads;
        At at{};
        at.seed = make_uint2(args.seed_low, args.seed_high);
        at.step = args.step, at.layer = args.layer, at.sample = args.sample + sample, at.head = head;
        const IN* from = static_cast<const IN*>(x.data) + sample * x.batch +
                         (per_kv && per_head ? head / args.group : head) * x.head + row * x.row;
        store(y + i, col < args.d ? rnd<ROUNDED>(value(from[col]), at(row, col)) : 0.f);
    }
}
