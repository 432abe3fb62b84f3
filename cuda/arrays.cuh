// Arrays in global memory: rows of them to shared memory, pairs of results back.
#pragma once

#include "dtypes.cuh"
#include "fragments.cuh"
#include "sites.cuh"
#include "tiles.cuh"

// Elements `column` (even) and the next of a row of `Length`; `aligned`: rows start at even elements.
template <int Length, class T>
inline void store_pair(T* row, int column, float x, float y, bool aligned) {
    if (Length % 2 == 0 && aligned) {
        if (column < Length) store_two(row + column, x, y);
    } else {
        if (column < Length) store(row + column, x);
        if (column + 1 < Length) store(row + column + 1, y);
    }
}

// Rows of an array to a tile of shared memory as operands of product P, rounded at `Site`; zeros from row `rows`
// and column `columns` on. `at` names the first element. Direct: the bytes are copied as they lie,
// asynchronously; they are the operand already, and rows and their starts are multiples of 16 bytes.
template <class P, class Site, int Rows, int Columns, int Threads, bool Direct, class T>
inline void load_rows(unsigned to, const T* from, long long stride, int rows, int columns, const At& at) {
    using Shared = SharedTile<P, Rows, Columns>;
    if constexpr (Direct) {
        constexpr int elements = 16 / sizeof(T), chunks = Columns / elements, together = Threads / chunks;
        if (Threads % chunks == 0 && Rows % together == 0 && together % 8 == 0 && rows >= Rows && columns >= Columns) {
            // A whole tile. The pointer moves on, so that no offsets are kept in registers.
            const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
            const T* source = from + row * stride + chunk * elements;
            to += Shared::chunk(row, chunk);
#pragma unroll
            for (int i = 0; i < Rows; i += together) {
                copy16_async(to + i * Shared::row, source);
                source += together * stride;
            }
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < Rows * chunks; i += Threads) {
                const int row = i / chunks, chunk = i % chunks;
                const bool valid = row < rows && chunk * elements < columns;
                copy16_async(to + Shared::chunk(row, chunk),
                             valid ? from + row * stride + chunk * elements : from, valid);
            }
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < Rows * Columns / 2; i += Threads) {
            const int row = i / (Columns / 2), column = i % (Columns / 2) * 2;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                x[e] = row < rows && column + e < columns
                           ? rnd<Site>(value(from[row * stride + column + e]), at(at.row + row, at.col + column + e))
                           : 0.f;
            const int byte = column * Shared::element;
            const unsigned address = to + Shared::chunk(row, byte / 16) + byte % 16;
            if constexpr (P::half)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pack<P::operand>(x[0], x[1])) : "memory");
            else
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x[0]), "f"(x[1]) : "memory");
        }
    }
}
