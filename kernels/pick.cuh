// From edited logits to a token: one read of the row by the cluster, then the first block alone, for greedy rows and
// whenever a few candidates suffice. Every path gives the token of reference.pick.
#pragma once
#include "block.cuh"
#include "logits.cuh"

constexpr int WIDTH = GROUPS / CLUSTER;   // groups a block reads
constexpr int DEPTH = THREADS / WIDTH;    // threads that share a group
constexpr int UNROLL = SCAN_UNROLL;       // loads a thread keeps in flight
constexpr int MAX_CANDIDATE_K = 512;
static_assert(THREADS % WIDTH == 0 && WIDTH % 32 == 0, "a warp stays within one depth");

// ------------------------------------------------------------------------------------------- one read of the row

DEVICE float largest(Four f) { return max_or_nan(max_or_nan(f.x[0], f.x[1]), max_or_nan(f.x[2], f.x[3])); }

// The maximum of one thread's vectors. UNROLL loads are always in flight: each is replaced as soon as it is used.
template <class L> DEVICE float scan_vectors(const L& z, int first, int stride) {
  Four f[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) f[u] = z.full(first + u * stride) ? z.load_full(first + u * stride) : NOTHING;
  float m = -INFINITE;
  for (int v = first; v < z.full_end; v += stride * UNROLL) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      int next = v + (UNROLL + u) * stride;
      m = max_or_nan(m, largest(f[u]));
      f[u] = next < z.full_end ? z.load_full(next) : NOTHING;
    }
  }
  if (first == 0 && z.full_begin > 0) m = max_or_nan(m, largest(z.load_partial(0)));
  int last = z.full_end;
  if (last < z.vectors && last >= z.full_begin && first % stride == last % stride)
    m = max_or_nan(m, largest(z.load_partial(last)));
  return m;
}

//  vectors   0 ....... 127 | 128 ..... 255 | ... | 896 .... 1023 | 1024 ....
//  block     0             | 1             |     | 7             | 0           (CLUSTER = 8)
//  group     0 ....... 127 | 128 ..... 255 | ... | 896 .... 1023 | 0 .......   thread: group within the block, depth
template <class L> DEVICE float scan_share(const L& z, u32 rank) {
  return scan_vectors(z, rank * WIDTH + threadIdx.x % WIDTH + GROUPS * (threadIdx.x / WIDTH), GROUPS * DEPTH);
}

// What the mailbox waits for: two keys of every 32 groups, and in the first block all their maxima.
DEVICE u32 mail_of(u32 rank) { return GROUPS / 32 * 8 + (rank ? 0 : GROUPS * 4); }

// Maxima of all groups to the first block; every 32 groups' largest and smallest key to it or to all blocks.
DEVICE void share_maxima(float m, Shared& s, u32 rank, bool to_all) {
  if (DEPTH > 1) {
    s.depth[threadIdx.x] = m;
    __syncthreads();
  }
  mailboxes_wait();
  if (threadIdx.x >= WIDTH) return;
  for (int d = 1; d < DEPTH; ++d) m = max_or_nan(m, s.depth[threadIdx.x + d * WIDTH]);
  int group = rank * WIDTH + threadIdx.x;
  send((u32*)&s.groups[group], __float_as_uint(m), &s.mailbox, 0);
  u32 key = m != m ? ~0u : key_of(canonical(m));
  u32 top = __reduce_max_sync(ALL_LANES, key);
  u32 bottom = __reduce_min_sync(ALL_LANES, key > MINUS_INFINITY_KEY ? key : ~0u);
  if (lane() >= (to_all ? CLUSTER : 1)) return;
  send(&s.tops[group >> 5], top, &s.mailbox, lane());
  send(&s.bottoms[group >> 5], bottom, &s.mailbox, lane());
}

DEVICE u32 row_top_key(const Shared& s) { return __reduce_max_sync(ALL_LANES, s.tops[lane() % (GROUPS / 32)]); }
DEVICE u32 row_bottom_key(const Shared& s) { return __reduce_min_sync(ALL_LANES, s.bottoms[lane() % (GROUPS / 32)]); }

// ------------------------------------------------------------------------------------------- candidates

// By one warp: the bin of s.counts in which the wanted-th entry lies, counting from `above`, into s.bin (-1: fewer).
DEVICE void locate_count(Shared& s, u32 above, u32 wanted) {
  const u32* mine = s.counts + 8 * lane();
  u32 sum = 0;
  for (int i = 0; i < 8; ++i) sum += mine[i];
  u32 before = above + warp_inclusive(sum) - sum;
  if (before < wanted && before + sum >= wanted) {
    int i = 0;
    for (; before + mine[i] < wanted; ++i) before += mine[i];
    s.bin = 8 * lane() + i, s.before = before, s.reached = before + mine[i];
  }
  if (lane() == 31 && before + sum < wanted) s.bin = -1;
}

// Radix rounds over the spread of the group maxima, usually one: s.bound = a key that at least `wanted` of them
// reach, and few more. At least `wanted` entries of the row reach it then, whatever the groups.
DEVICE void find_bound(Shared& s, u32 top, int wanted) {
  u32 high = top, low = row_bottom_key(s);
  int above = 0, slack = 8 + wanted / 4;
  for (;;) {
    int bits = 32 - __clz(high - low), shift = bits > 8 ? bits - 8 : 0;
    if (threadIdx.x < 256) s.counts[threadIdx.x] = 0;
    __syncthreads();
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) {
      u32 key = key_of(canonical(s.groups[g]));
      if (key >= low && key <= high) atomicAdd(&s.counts[(high - key) >> shift], 1u);
    }
    __syncthreads();
    if (warp() == 0) locate_count(s, above, wanted);
    __syncthreads();
    if (s.bin < 0) { low = MINUS_INFINITY_KEY + 1; break; }  // fewer finite groups than wanted: take everything
    u64 depth = ((u64)s.bin + 1) << shift;
    low = depth > high - low ? low : high - (u32)depth + 1;
    if (s.reached - wanted <= slack || shift == 0) break;
    high -= (u32)s.bin << shift, above = s.before;
    __syncthreads();
  }
  if (threadIdx.x == 0) s.bound = low;
  __syncthreads();
}

// The float from which on an entry may be a candidate: zeros and denormals are one value.
DEVICE float bound_of(u32 key) {
  float bound = of_key(key);
  return fabsf(bound) < SMALLEST_NORMAL ? -SMALLEST_NORMAL : bound;
}

// Calls visit(z, id) for every entry that reaches the bound, of the groups whose maximum does.
template <class L, class Visit> DEVICE void revisit(const L& z, Shared& s, float bound, Visit visit) {
  if (threadIdx.x == 0) s.num_hot = 0;
  __syncthreads();
  for (int g = threadIdx.x; g < GROUPS; g += THREADS)
    if (s.groups[g] >= bound) s.hot[atomicAdd(&s.num_hot, 1)] = (unsigned short)g;
  __syncthreads();
  int rounds = (z.vectors + GROUPS - 1) / GROUPS, bits = rounds > 1 ? 32 - __clz(rounds - 1) : 0;
  int items = s.num_hot << bits;
  constexpr int ROUND = BLOCKS == 1 ? 8 : 4;
  for (int start = threadIdx.x; start < items; start += THREADS * ROUND) {
    Four f[ROUND];
    int at[ROUND];
#pragma unroll
    for (int u = 0; u < ROUND; ++u) {
      int item = start + u * THREADS;
      at[u] = item < items ? s.hot[item >> bits] + GROUPS * (item & ((1 << bits) - 1)) : z.vectors;
      f[u] = z.full(at[u]) ? z.load_full(at[u]) : NOTHING;
    }
#pragma unroll
    for (int u = 0; u < ROUND; ++u) {
      if (at[u] < z.vectors && !z.full(at[u])) f[u] = z.load_partial(at[u]);
      if (!(largest(f[u]) >= bound)) continue;
      for (int j = 0; j < 4; ++j)
        if (f[u].x[j] >= bound) visit(f[u].x[j], z.id(at[u], j));
    }
  }
}

// Over the block's threads.
DEVICE u64 block_max(u64 x, Shared& s) {
  for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
  __syncthreads();
  if (lane() == 0) s.warp_sums[0][warp()] = x;
  __syncthreads();
  for (int w = 0; w < WARPS; ++w) x = max(x, s.warp_sums[0][w]);
  return x;
}

// Lowest id among the entries of the highest value, into s.token.
template <class L> DEVICE void greedy(const L& z, Shared& s, u32 top) {
  u64 best = 0;
  revisit(z, s, bound_of(top), [&](float x, int id) { best = max(best, rank_of(x, id)); });
  best = block_max(best, s);
  if (threadIdx.x == 0) s.token = (int)id_of(best);
  __syncthreads();
}

// Entries from s.bound up, unsorted, in s.ranks; their number, which may exceed CAPACITY.
template <class L> DEVICE int collect_candidates(const L& z, Shared& s) {
  if (threadIdx.x == 0) s.found = 0;
  revisit(z, s, bound_of(s.bound), [&](float x, int id) {
    int place = atomicAdd(&s.found, 1);
    if (place < CAPACITY) s.ranks[place] = rank_of(x, id);
  });
  __syncthreads();
  return s.found;
}

// By one warp: cut the sorted, weighed ranks by top_p and draw: the token.
DEVICE int draw_sorted(const Shared& s, int n, u64 uniform) {
  auto mass = [&](int i) { return s.mass[i]; };
  Slices slices(mass, n, 0);
  u64 kept = slices.total;
  if (s.row.top_p < TOP_P_OFF) kept = slices.locate(mass, nucleus_end(kept, s.row.top_p)).inclusive;
  return (int)id_of(s.ranks[slices.locate(mass, __umul64hi(uniform, kept)).index]);
}

// The token in s.token, or -1 where there are too many candidates: of top_k, what its k best lie among; of min_p
// alone, exactly what it keeps.
template <class L> DEVICE void draw_from_candidates(const L& z, Shared& s, u32 top_key, u64 uniform) {
  const Row& row = s.row;
  Depths depths(of_key(top_key), row.scale, row.reach);
  if (row.top_k) {
    find_bound(s, top_key, row.top_k);
  } else {
    if (warp() == 0) s.bound = first_key(top_key, [&](float z) { return depths.of(z) < DEEPEST; });
    __syncthreads();
  }
  int n = collect_candidates(z, s);
  if (n > CAPACITY) {
    if (threadIdx.x == 0) s.token = -1;
  } else {
    sort_best_first(s, n);
    n = row.top_k ? min(row.top_k, n) : n;
    weigh_sorted(s, n, n, depths);
    if (warp() == 0) {
      int token = draw_sorted(s, n, uniform);
      if (lane() == 0) s.token = token;
    }
  }
  __syncthreads();
}
