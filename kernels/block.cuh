// What one block does together: its shared memory, prefix sums, and the sort of a short list.
#pragma once
#include "numbers.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = 1024;      // group(vector) = vector % GROUPS
constexpr int CAPACITY = 2048;    // entries that are sorted at once
constexpr int BIN_SHIFT = 19;     // bins of 1/32 octave of probability
constexpr int BINS = (42 << 24 >> BIN_SHIFT) + 1;
constexpr int CHUNK_BITS = 10;    // ids per chunk of the draw in id order
constexpr int MAX_CHUNKS = 256;
constexpr int FINE_BITS = 10;

// The sums of a bin: its mass as two words, because shared memory adds 32-bit words natively.
struct Bins { u32 low[BINS], high[BINS], count[BINS]; };

// What a block keeps in shared memory; the cluster's first block also receives the others' part.
struct Shared {
  u64 ranks[CAPACITY];            // entries to sort, then sorted
  union {
    u64 mass[CAPACITY];           // of the sorted entries
    u64 scratch[CAPACITY];        // while sorting
    struct { u32 low[1 << FINE_BITS], high[1 << FINE_BITS], count[1 << FINE_BITS]; } fine;
  };
  union {
    Bins bins;
    struct { float groups[GROUPS]; float depth[4 * THREADS]; unsigned short hot[GROUPS]; };
    u64 chunk_mass[MAX_CHUNKS];
  };
  u32 counts[256];                // histogram of group maxima; then places while sorting
  int places[512];
  u64 warp_sums[WARPS + 1];
  u64 kept, before;
  Row row;
  u32 tops[8];                    // every block's largest key
  u32 flags;                      // of the edits
  u32 settled;
  int found, num_hot, bin, token, draw_low, draw_high;
  u32 bound;
};

constexpr u32 SAW_NAN = 1, HID_SOMETHING = 2;

DEVICE u32 lane() { return threadIdx.x & 31; }
DEVICE u32 warp() { return threadIdx.x >> 5; }

DEVICE u64 warp_inclusive(u64 x) {
  for (int step = 1; step < 32; step <<= 1) {
    u64 other = __shfl_up_sync(ALL_LANES, x, step);
    if ((int)lane() >= step) x += other;
  }
  return x;
}

// Inclusive prefix sums over the block's threads; total is the sum of all. Two barriers.
DEVICE u64 block_inclusive(u64 x, Shared& s, u64& total) {
  u64 inclusive = warp_inclusive(x);
  if (lane() == 31) s.warp_sums[warp()] = inclusive;
  __syncthreads();
  if (warp() == 0) {
    u64 sums = warp_inclusive(lane() < WARPS ? s.warp_sums[lane()] : 0);
    if (lane() < WARPS) s.warp_sums[lane()] = sums;
  }
  __syncthreads();
  total = s.warp_sums[WARPS - 1];
  u64 before = warp() ? s.warp_sums[warp() - 1] : 0;
  __syncthreads();
  return before + inclusive;
}

// Sorts n <= 512 ranks, best first: every rank counts the better ones. No exchange, three barriers.
DEVICE void sort_by_counting(Shared& s, int n) {
  int width = 32;
  while (width < n) width <<= 1;
  int mine = threadIdx.x & (width - 1), stride = THREADS / width;
  for (int i = threadIdx.x; i < width; i += THREADS) s.places[i] = 0;
  __syncthreads();
  u64 rank = mine < n ? s.ranks[mine] : 0;
  int better = 0;
  for (int other = threadIdx.x / width; other < n; other += stride) better += s.ranks[other] > rank;
  if (mine < n && better) atomicAdd(&s.places[mine], better);
  __syncthreads();
  if ((int)threadIdx.x < n) s.scratch[s.places[mine]] = rank;
  __syncthreads();
  if ((int)threadIdx.x < n) s.ranks[threadIdx.x] = s.scratch[threadIdx.x];
  __syncthreads();
}

// Sorts n <= CAPACITY ranks, best first.
RARELY void sort_bitonic(Shared& s, int n) {
  int width = 512;
  while (width < n) width <<= 1;
  for (int i = n + threadIdx.x; i < width; i += THREADS) s.ranks[i] = 0;
  __syncthreads();
  for (int size = 2; size <= width; size <<= 1)
    for (int step = size >> 1; step > 0; step >>= 1) {
      for (int i = threadIdx.x; i < width; i += THREADS) {
        int other = i ^ step;
        u64 a = s.ranks[i], b = s.ranks[other];
        if (other > i && (a < b) == ((i & size) == 0)) s.ranks[i] = b, s.ranks[other] = a;
      }
      __syncthreads();
    }
}

DEVICE void sort_best_first(Shared& s, int n) {
  if (n <= 512 && n <= THREADS) sort_by_counting(s, n);
  else sort_bitonic(s, n);
}

// Masses of the n sorted ranks from the limit-th on are 0: top_k. What min_p cuts or lies too far down has none.
DEVICE u64 weigh_sorted(Shared& s, int n, int limit, float top) {
  u64 sum = 0, total;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    u64 mass = i < limit ? mass_of(level_of(of_key((u32)(s.ranks[i] >> 32)), top, s.row)) : 0;
    s.mass[i] = mass;
    sum += mass;
  }
  block_inclusive(sum, s, total);
  return total;
}

// Among the n sorted entries, the one whose inclusive prefix (from base on) first exceeds target: its id in s.token,
// its inclusive prefix in s.kept.
DEVICE void locate_sorted(Shared& s, int begin, int n, u64 base, u64 target) {
  for (int start = 0; start < n; start += THREADS) {
    int i = start + threadIdx.x;
    u64 mass = i < n ? s.mass[begin + i] : 0, total;
    u64 inclusive = base + block_inclusive(mass, s, total);
    if (inclusive > target && inclusive - mass <= target) s.token = (int)id_of(s.ranks[begin + i]), s.kept = inclusive;
    base += total;
  }
  __syncthreads();
}
