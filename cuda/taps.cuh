// Taps: what each site was given and what it made of it, written to memory for dumps and statistics. Compiled in
// by the macro TAPS; the twin of cuflash/taps.py, which fills `taps` before a launch.
#pragma once

// Where a site's values go; nowhere, where `x` is null. Values outside the heads, tiles, rows and columns are not
// the site's: padding of a block.
struct Tap {
    float *x, *rounded;
    unsigned sample, head, step;               // the first head, and how far on the next one is
    unsigned heads, times, tiles, rows, cols;  // lengths; tiles is 0 where the value is not one of a tile
};

constexpr unsigned not_there = 1u << 31;  // a row or column that no value has, nor its neighbour

#ifdef TAPS
constexpr bool tapped = true;
extern "C" __device__ Tap taps[TAPS];  // by the site's number

// A call: it is made for every element of a thread. time: which of a site's roundings of a row.
__noinline__ void tap(const Tap& t, float x, float rounded, unsigned sample, unsigned head, unsigned row, unsigned col,
                      unsigned tile, unsigned time) {
    if (!t.x || sample != t.sample || row >= t.rows || col >= t.cols || t.tiles && tile >= t.tiles) return;
    size_t at = (head - t.head) / t.step;
    if (at >= t.heads || (head - t.head) % t.step) return;
    at = at * t.times + time;
    if (t.tiles) at = at * t.tiles + tile;
    at = (at * t.rows + row) * t.cols + col;
    t.x[at] = x;
    t.rounded[at] = rounded;
}
#else
constexpr bool tapped = false;
#endif
