// Arrays in global memory: their dtypes, rows of them to shared memory, pairs of results back.
#pragma once

#include "fragments.cuh"
#include "sites.cuh"
#include "tiles.cuh"

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

inline float value(float x) { return x; }
inline float value(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline float value(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// x, a value of the dtype, so that nothing is rounded here.
inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) { to->bits = pack<Operand::bf16>(x, 0) & 0xFFFF; }
inline void store(fp16* to, float x) { to->bits = pack<Operand::fp16>(x, 0) & 0xFFFF; }

inline void store_two(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
inline void store_two(bf16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = pack<Operand::bf16>(x, y); }
inline void store_two(fp16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = pack<Operand::fp16>(x, y); }

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

// Rows of an array to shared memory as operands of product P, rounded at `Site`; zeros from row `rows` and
// column `columns` on, Rows × Columns in all. `at` names the first element. Direct: the bytes are copied as they
// lie, asynchronously; they are the operand already, and rows and their starts are multiples of 16 bytes.
template <class P, class Site, int Rows, int Columns, int Threads, bool Direct, class T>
inline void load_rows(unsigned to, const T* from, long long stride, int rows, int columns, const At& at) {
    constexpr int bytes = row_bytes<P, Columns>;
    if constexpr (Direct) {
        constexpr int elements = 16 / sizeof(T), chunks = Columns / elements, together = Threads / chunks;
        if constexpr (Threads % chunks == 0 && Rows % together == 0) {
            const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
            const bool inside = chunk * elements < columns;
            const T* source = from + (inside ? row * stride + chunk * elements : 0);
            to += row * bytes + chunk * 16;
#pragma unroll
            for (int i = 0; i < Rows; i += together) {
                const bool valid = inside && row + i < rows;
                copy16_async(to + i * bytes, valid ? source + i * stride : from, valid);
            }
        } else {
            for (int i = threadIdx.x; i < Rows * chunks; i += Threads) {
                const int row = i / chunks, chunk = i % chunks;
                const bool valid = row < rows && chunk * elements < columns;
                copy16_async(to + row * bytes + chunk * 16, valid ? from + row * stride + chunk * elements : from, valid);
            }
        }
    } else {
        for (int i = threadIdx.x; i < Rows * Columns / 2; i += Threads) {
            const int row = i / (Columns / 2), column = i % (Columns / 2) * 2;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                x[e] = row < rows && column + e < columns
                           ? rnd<Site>(value(from[row * stride + column + e]), at(at.row + row, at.col + column + e)) : 0.f;
            const unsigned address = to + row * bytes + column * (P::half ? 2 : 4);
            if constexpr (P::half)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pack<P::operand>(x[0], x[1])) : "memory");
            else
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x[0]), "f"(x[1]) : "memory");
        }
    }
}
