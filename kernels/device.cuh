// What the kernels need of the device beyond plain C++: exact float arithmetic, warp sums, and the row's cluster.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define RARELY __device__ __noinline__  // off the usual path: kept out of its instruction cache

constexpr u32 ALL_LANES = 0xffffffffu;
#define INFINITE __uint_as_float(0x7f800000u)
constexpr float LARGEST = 3.402823466e+38f;
constexpr float SMALLEST_NORMAL = 1.175494351e-38f;

// The compiler is told to flush denormals (CuPy adds -ftz=true to every compilation). These do not.
DEVICE float exact_add(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_sub(float a, float b) { float r; asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_mul(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_mul_up_to_1(float a, float b) { float r; asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float exact_div(float a, float b) { float r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE double exact_double(float x) { double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x)); return r; }
// A maximum that remembers a NaN: one instruction, where a test of every entry would be three.
DEVICE float max_or_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }

struct Four { float x[4]; };

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The address comes out of memory, so the compiler cannot know that it is a global one. A row passes through the first
// cache only once: kept out of it, 256 rows take 74 us instead of 78.
DEVICE Four load_global(const float* p) {
  Four f;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(f.x[0]), "=f"(f.x[1]), "=f"(f.x[2]), "=f"(f.x[3]) : "l"(p));
  return f;
}

// Where a < b: x to shared memory at `at`, y APART bytes behind, and `at` moves on by STRIDE. No branch.
template <int APART, int STRIDE> DEVICE void store_if_less(float a, float b, u32& at, float x, int y) {
  asm volatile("{\n.reg .pred less;\nsetp.lt.f32 less, %1, %2;\n@less st.shared.f32 [%0], %3;\n"
               "@less st.shared.u32 [%0 + %5], %4;\n@less add.u32 %0, %0, %6;\n}"
               : "+r"(at) : "f"(a), "f"(b), "f"(x), "r"(y), "n"(APART), "n"(STRIDE) : "memory");
}

DEVICE float half_to_float(unsigned short h) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h)); return r; }

// A cluster is the CLUSTER blocks that work on one row; they share their shared memory. A device without clusters
// gives a row one block.
#if CLUSTER > 1
#define CLUSTER_DIMENSIONS __cluster_dims__(CLUSTER, 1, 1)
DEVICE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE u32 shared_at_rank(const void* mine, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  return there;
}
template <class T> DEVICE T* at_rank(T* mine, u32 rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((u64)mine), "r"(rank));
  return (T*)there;
}
// All the cluster's threads have come this far, and see each other's writes.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A mailbox is a barrier in shared memory that opens when so many bytes have been sent to it. Sending carries its own
// signal: unlike a cluster barrier's release it does not wait for every earlier write of the thread.
DEVICE void open_mailbox(u64* box, u32 bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n"
               "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
               "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(box)), "r"(bytes) : "memory");
}
// Every block's mailbox is open: arrive behind open_mailbox, wait before sending.
DEVICE void mailboxes_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void mailboxes_arrive_with_writes() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void mailboxes_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE void send(u32* mine, u32 value, u64* box, u32 rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   shared_at_rank(mine, rank)), "r"(value), "r"(shared_at_rank(box, rank)) : "memory");
}
DEVICE void await(u64* box) {
  asm volatile("{\n.reg .pred open;\nWAIT:\n"
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 open, [%0], 0;\n"
               "@!open bra WAIT;\n}" ::"r"(shared_address(box)) : "memory");
}
#else
#define CLUSTER_DIMENSIONS
DEVICE u32 cluster_rank() { return 0; }
template <class T> DEVICE T* at_rank(T* mine, u32) { return mine; }
DEVICE void cluster_sync() { __syncthreads(); }
DEVICE void open_mailbox(u64*, u32) {}
DEVICE void mailboxes_arrive() {}
DEVICE void mailboxes_arrive_with_writes() {}
DEVICE void mailboxes_wait() { __syncthreads(); }
DEVICE void send(u32* mine, u32 value, u64*, u32) { *mine = value; }
DEVICE void await(u64*) { __syncthreads(); }
#endif

#define SHARED(Type, name)                   \
  extern __shared__ __align__(16) char raw_shared[]; \
  Type& name = *(Type*)raw_shared
