// What the kernels need of the device beyond plain C++: exact float arithmetic, warp sums, and the row's cluster.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define RARELY __device__ __noinline__  // off the usual path: kept out of its instruction cache

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float INFINITE = __builtin_huge_valf();
constexpr float LARGEST = 3.402823466e+38f;
constexpr float SMALLEST_NORMAL = 1.175494351e-38f;

// The compiler is told to flush denormals (CuPy adds -ftz=true to every compilation). These do not.
DEVICE float exact_add(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_sub(float a, float b) { float r; asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_mul(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_div(float a, float b) { float r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
// A maximum that remembers a NaN: one instruction, where a test of every entry would be three.
DEVICE float max_or_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }

DEVICE float half_to_float(unsigned short h) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h)); return r; }

// A cluster is the CLUSTER blocks that work on one row; they share their shared memory.
DEVICE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <class T> DEVICE T* at_rank(T* mine, u32 rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((u64)mine), "r"(rank));
  return (T*)there;
}

#define SHARED(Type, name)                   \
  extern __shared__ __align__(16) char raw_shared[]; \
  Type& name = *(Type*)raw_shared
