// From edited logits to a token: one read of the row by the cluster, then the first block alone, for greedy rows and
// whenever a few candidates suffice. Every path gives the token of reference.pick.
#pragma once
#include "block.cuh"
#include "logits.cuh"

constexpr int WIDTH = GROUPS / CLUSTER;   // groups a block scans
constexpr int DEPTH = THREADS / WIDTH;    // threads that share a group
constexpr int UNROLL = SCAN_UNROLL;       // loads a thread keeps in flight
constexpr int MAX_CANDIDATE_K = 512;
constexpr int MIN_P_CANDIDATES = 256;
static_assert(THREADS % WIDTH == 0 && WIDTH % 32 == 0, "a warp stays within one depth");

DEVICE float largest(Four f) { return max_or_nan(max_or_nan(f.x[0], f.x[1]), max_or_nan(f.x[2], f.x[3])); }

//  vectors   0 ....... 127 | 128 ..... 255 | ... | 896 .... 1023 | 1024 ....
//  block     0             | 1             |     | 7             | 0           (CLUSTER = 8)
//  group     0 ....... 127 | 128 ..... 255 | ... | 896 .... 1023 | 0 .......   thread: group within the block, depth
// The maximum of one thread's vectors: every UNROLL loads are in flight together.
template <class L> DEVICE float scan_vectors(const L& z, int first, int stride) {
  float m = -INFINITE;
  for (int v = first; v < z.vectors; v += stride * UNROLL) {
    Four f[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      int at = v + u * stride;
      f[u] = z.full(at) ? z.load_full(at) : Four{{-INFINITE, -INFINITE, -INFINITE, -INFINITE}};
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) m = max_or_nan(m, largest(f[u]));
  }
  if (z.full_begin > 0 && first == 0) m = max_or_nan(m, largest(z.load_partial(0)));
  int last = z.full_end;
  if (last < z.vectors && last >= z.full_begin && first % stride == last % stride) m = max_or_nan(m, largest(z.load_partial(last)));
  return m;
}

// Maxima of all groups into the first block's shared memory, and every block's largest key into all blocks'.
// Ends behind the arrival at a cluster barrier: wait for it before reading either.
template <class L> DEVICE void scan(const L& z, Shared& s, u32 rank) {
  int column = threadIdx.x % WIDTH, depth = threadIdx.x / WIDTH;
  s.depth[threadIdx.x] = scan_vectors(z, rank * WIDTH + column + GROUPS * depth, GROUPS * DEPTH);
  __syncthreads();
  cluster_wait();
  if (threadIdx.x < WIDTH) {
    float m = s.depth[threadIdx.x];
    for (int d = 1; d < DEPTH; ++d) m = max_or_nan(m, s.depth[threadIdx.x + d * WIDTH]);
    *at_rank(&s.groups[rank * WIDTH + threadIdx.x], 0) = m;
    u32 key = m != m ? ~0u : key_of(canonical(m));
    key = __reduce_max_sync(ALL_LANES, key);
    if (lane() < CLUSTER) atomicMax(at_rank(&s.tops[rank], lane()), key);
  }
  cluster_arrive();
}

DEVICE u32 row_top_key(const Shared& s) {
  u32 top = 0;
  for (int r = 0; r < CLUSTER; ++r) top = max(top, s.tops[r]);
  return top;
}

constexpr u32 MINUS_INFINITY_KEY = 0x007fffffu;  // key_of(-inf)

// Radix rounds over the keys' spread: s.bound = a key that at least `wanted` group maxima reach, and few more.
DEVICE void find_bound(Shared& s, u32 top, int wanted) {
  u32 high = top, low = MINUS_INFINITY_KEY + 1;
  int above = 0, slack = 8 + wanted / 4;
  for (;;) {
    int bits = 32 - __clz(high - low), shift = bits > 8 ? bits - 8 : 0;
    for (int i = threadIdx.x; i < 256; i += THREADS) s.counts[i] = 0;
    __syncthreads();
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) {
      u32 key = key_of(canonical(s.groups[g]));
      if (key >= low && key <= high) atomicAdd(&s.counts[(high - key) >> shift], 1u);
    }
    __syncthreads();
    if (warp() == 0) {
      const u32* mine = s.counts + 8 * lane();
      u32 sum = 0;
      for (int i = 0; i < 8; ++i) sum += mine[i];
      u32 inclusive = sum;
      for (int step = 1; step < 32; step <<= 1) {
        u32 other = __shfl_up_sync(ALL_LANES, inclusive, step);
        if ((int)lane() >= step) inclusive += other;
      }
      u32 before = above + inclusive - sum;
      if (before < (u32)wanted && before + sum >= (u32)wanted) {
        int i = 0;
        while (before + mine[i] < (u32)wanted) before += mine[i++];
        s.bin = 8 * lane() + i, s.found = before + mine[i], s.num_hot = before;
      }
      if (lane() == 31 && before + sum < (u32)wanted) s.bin = -1;
    }
    __syncthreads();
    int bin = s.bin, reached = s.found, before = s.num_hot;
    __syncthreads();
    if (bin < 0) { low = MINUS_INFINITY_KEY + 1; break; }  // fewer finite groups than wanted: take everything
    u32 bin_low = high - (((u32)bin + 1) << shift) + 1;
    if ((u64)((u32)bin + 1) << shift > high - low) bin_low = low;
    u32 bin_high = high - ((u32)bin << shift);
    low = bin_low;
    if (reached - wanted <= slack || shift == 0) break;
    high = bin_high, above = before;
  }
  if (threadIdx.x == 0) s.bound = low;
  __syncthreads();
}

// The float from which on an entry may be a candidate: zeros and denormals are one value.
DEVICE float bound_of(u32 key) {
  float bound = of_key(key);
  return fabsf(bound) < SMALLEST_NORMAL ? -SMALLEST_NORMAL : bound;
}

// Calls visit(z, id) for every entry of the groups whose maximum reaches the bound, if the entry does.
template <class L, class Visit> DEVICE void revisit(const L& z, Shared& s, float bound, Visit visit) {
  if (threadIdx.x == 0) s.num_hot = 0;
  __syncthreads();
  for (int g = threadIdx.x; g < GROUPS; g += THREADS)
    if (s.groups[g] >= bound) s.hot[atomicAdd(&s.num_hot, 1)] = (unsigned short)g;
  __syncthreads();
  int rounds = (z.vectors + GROUPS - 1) / GROUPS, bits = rounds > 1 ? 32 - __clz(rounds - 1) : 0;
  int items = s.num_hot << bits;
  for (int start = threadIdx.x; start < items; start += THREADS * UNROLL) {
    Four f[UNROLL];
    int at[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      int item = start + u * THREADS;
      at[u] = item < items ? s.hot[item >> bits] + GROUPS * (item & ((1 << bits) - 1)) : z.vectors;
      f[u] = z.full(at[u]) ? z.load_full(at[u]) : Four{{-INFINITE, -INFINITE, -INFINITE, -INFINITE}};
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (at[u] < z.vectors && !z.full(at[u])) f[u] = z.load_partial(at[u]);
      for (int j = 0; j < 4; ++j)
        if (f[u].x[j] >= bound) visit(f[u].x[j], z.id(at[u], j));
    }
  }
}

// Lowest id among the entries of the highest value.
template <class L> DEVICE int greedy(const L& z, Shared& s, u32 top) {
  u64 best = 0;
  revisit(z, s, bound_of(top), [&](float x, int id) { best = max(best, rank_of(x, id)); });
  for (int step = 16; step > 0; step >>= 1) best = max(best, __shfl_xor_sync(ALL_LANES, best, step));
  if (lane() == 0) s.warp_sums[warp()] = best;
  __syncthreads();
  for (int w = 0; w < WARPS; ++w) best = max(best, s.warp_sums[w]);
  return (int)id_of(best);
}

// Entries from the wanted-th largest group maximum up, unsorted, in s.ranks; their number, which may exceed CAPACITY.
template <class L> DEVICE int collect_candidates(const L& z, Shared& s, u32 top, int wanted) {
  find_bound(s, top, wanted);
  if (threadIdx.x == 0) s.found = 0;
  revisit(z, s, bound_of(s.bound), [&](float x, int id) {
    int place = atomicAdd(&s.found, 1);
    if (place < CAPACITY) s.ranks[place] = rank_of(x, id);
  });
  __syncthreads();
  return s.found;
}

// Cut the sorted ranks by k, min_p and top_p and draw: the token.
DEVICE int draw_sorted(Shared& s, int n, int limit, float top, u64 uniform) {
  u64 kept = weigh_sorted(s, n, limit, top);
  if (s.row.top_p < TOP_P_OFF) {
    locate_sorted(s, 0, n, 0, nucleus_end(kept, s.row.top_p));
    kept = s.kept;
    __syncthreads();
  }
  locate_sorted(s, 0, n, 0, __umul64hi(uniform, kept));
  return s.token;
}

// The token, or -1 where candidates do not settle it: too many of them, or min_p may keep more.
template <class L> DEVICE int draw_from_candidates(const L& z, Shared& s, u32 top_key, u64 uniform) {
  const Row& row = s.row;
  float top = of_key(top_key);
  int n = collect_candidates(z, s, top_key, row.top_k ? row.top_k : MIN_P_CANDIDATES);
  bool all_massive = !row.top_k && s.bound > MINUS_INFINITY_KEY + 1 && mass_of(level_of(of_key(s.bound), top, row)) > 0;
  if (n > CAPACITY || all_massive) return -1;
  sort_best_first(s, n);
  return draw_sorted(s, n, row.top_k ? min(row.top_k, n) : n, top, uniform);
}
