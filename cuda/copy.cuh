#pragma once
// Between memories and registers: cp.async (global to shared), ldmatrix and stmatrix (shared to and from
// fragments). Shared addresses are 32-bit, from `shared_address`; 16-byte accesses need 16-byte alignment.

inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared, past L1. With valid = false the 16 bytes become zero and the source is
// not read, though it must still be an address of the array.
inline void copy16_async(unsigned to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0) : "memory");
}

// Closes the group of copies begun since the last call.
inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` groups are under way. A barrier must follow before other threads read.
template <int Pending>
inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

// Four (two) 8 × 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8; for
// two, lanes 16 to 31 are not looked at. Lane l receives elements 2t, 2t + 1 of row g of each (mma.cuh).
inline void load_matrices(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

inline void load_matrices(unsigned (&r)[2], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

// The same, each matrix transposed: lane l receives elements (2t, g), (2t + 1, g).
inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

inline void load_matrices_transposed(unsigned (&r)[2], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

#if __CUDA_ARCH__ >= 900
inline void store_matrices(unsigned address, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
#endif
