// Lengths, masks, tile ranges and offsets of attention: the twin of cuflash/tiles.py.
//
// Causal masks align bottom-right: query i sees key j iff j <= i + Tk - Tq. A numeric tile is visited iff one
// of its Br × Bc entries is visible. A tile length of 0 means the whole axis.
#pragma once

inline int tile_length(int tile, int length) { return tile ? tile : length > 0 ? length : 1; }

struct Shape {
    int tq, tk;
    bool causal;

    // The last key that a query sees; below 0 if it sees none.
    int last_key(int row) const { return causal ? row + (tk - tq) : tk - 1; }

    bool visible(int row, int key) const { return key <= last_key(row) && key < tk; }

    // Whether rows from q0 on see all keys below k1, so that no mask is needed.
    bool all_visible(int q0, int k1) const { return last_key(q0) >= k1 - 1 && k1 <= tk; }

    // End of the last key tile visited by a query tile that ends before row q1; 0 if none is.
    int key_end(int q1, int bc) const {
        const int last = last_key(q1 - 1);
        if (last < 0) return 0;
        const int length = tile_length(bc, tk), start = last / length * length;
        return tk - start < length ? tk : start + length;
    }

    // First row of the first query tile that visits the key tile starting at k0 (may be >= tq).
    int first_row(int k0, int br) const {
        if (!causal) return 0;
        const int row = k0 - (tk - tq) > 0 ? k0 - (tk - tq) : 0, length = tile_length(br, tq);
        return row / length * length;
    }

    // End of the query tile that holds a row.
    int query_tile_end(int row, int br) const {
        const int length = tile_length(br, tq), start = row / length * length;
        return tq - start < length ? tq : start + length;
    }
};

// An array (batch, heads, T, D), the last axis contiguous, strides in elements.
template <class T>
struct Array {
    T* data;
    long long batch, head, row;

    T* rows(int b, int h) const { return data + b * batch + h * head; }
};
