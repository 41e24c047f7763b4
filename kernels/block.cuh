// What one block does together: its shared memory, prefix sums, and the sort of a short list.
#pragma once
#include "numbers.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = 1024 / (32 * CLUSTER) * (32 * CLUSTER);  // group(vector) = vector % GROUPS
constexpr int CAPACITY = 2048;    // entries that are sorted at once
constexpr int BINS = 43 * 32 + 1;  // of 1/32 octave of probability; further down there is no mass
// Near entries a thread keeps. Small clusters keep none (1 is for the array): many rows are read faster the more of an
// SM's memory is left to its cache.
constexpr bool KEEPS = CLUSTER > 2;
constexpr int KEPT = KEEPS ? 24 : 1;
constexpr int AHEAD = BLOCKS == 1 ? SCAN_UNROLL : 2;  // loads in flight while masses are summed: as registers allow
constexpr int CHUNK_BITS = 10;    // ids per chunk of the draw in id order
constexpr int STRIP_BITS = 8;     // ids that one warp sums at a time
constexpr int MAX_STRIPS = 1024;
constexpr int FINE_BITS = 10;

DEVICE int bin_of(float depth) { return __float_as_uint(__fmaf_rn(depth, 64.0f * 32, ROUNDER)) - __float_as_uint(ROUNDER); }

// A sum of masses as two words, because shared memory adds 32-bit words natively.
struct Mass {
  u32 low, high;
  DEVICE u64 value() const { return (u64)high << 32 | low; }
  // The carry is whoever's addition overflows, so the sum is exact in any order.
  DEVICE void add(u32 more_low, u32 more_high) {
    u32 old = atomicAdd(&low, more_low);
    u32 carried = (u32)(((u64)more_high << 32 | more_low) + old >> 32);
    if (carried) atomicAdd(&high, carried);
  }
  DEVICE void add(u64 mass) { add((u32)mass, (u32)(mass >> 32)); }
};
// Near entries, a column a thread: they are looked at again, the row is not.
struct Kept { float z[KEPT][THREADS]; int id[KEPT][THREADS]; };
struct FineBins { Mass mass[1 << FINE_BITS]; u32 count[1 << FINE_BITS]; };

// A bin in which an inclusive prefix of masses first exceeds some target.
struct Spot { int bin; u64 before, mass; };

// The bin in which the nucleus ends, and those the draw can fall into.
struct Wanted {
  int last, from, to;
  DEVICE bool has(int bin) const { return bin == last || (bin >= from && bin <= to); }
};

// What a block keeps in shared memory; the cluster's first block also receives the others' parts.
struct Shared {
  u64 ranks[CAPACITY];            // entries to sort, then sorted
  union {
    u64 mass[CAPACITY];           // of the sorted entries
    u64 scratch[CAPACITY];        // while sorting
    FineBins fine;
  };
  union {
    Mass bins[BINS];
    struct { float groups[GROUPS]; float depth[THREADS]; unsigned short hot[GROUPS]; };
    u64 strip_mass[MAX_STRIPS];
    u32 bin_count[BINS];          // a large top_k only, once the masses are no longer needed
  };
  u32 counts[256];                // histogram of group maxima
  int places[512];                // while sorting
  u64 warp_sums[2][32];
  Spot spots[3];
  u64 shares[CLUSTER];            // each block's share of the row's mass
  Row row;
  Uniforms uniform;
  u64 mailbox;                    // opens when groups, tops and bottoms are complete
  u32 tops[GROUPS / 32], bottoms[GROUPS / 32];  // largest key, and smallest finite key, of 32 groups
  u32 flags, settled, bound, bottom, deep;
  int found, num_hot, bin, reached, before, token, chunk;
  int num_last, num_draw;
  Wanted wanted;
  Kept kept;
};

extern "C" __device__ const int shared_bytes = sizeof(Shared);

constexpr u32 SAW_NAN = 1, HID_SOMETHING = 2;

DEVICE u32 lane() { return threadIdx.x & 31; }
DEVICE u32 warp() { return threadIdx.x >> 5; }

template <class T> DEVICE T warp_inclusive(T x) {
  for (int step = 1; step < 32; step <<= 1) {
    T other = __shfl_up_sync(ALL_LANES, x, step);
    if ((int)lane() >= step) x += other;
  }
  return x;
}

struct Sums { u64 inclusive, total; };

// Prefix sums over the block's threads behind one barrier; calls that follow each other alternate between two rooms.
DEVICE Sums block_inclusive(u64 x, Shared& s, int room) {
  u64 inclusive = warp_inclusive(x);
  if (lane() == 31) s.warp_sums[room][warp()] = inclusive;
  __syncthreads();
  u64 sums = warp_inclusive(lane() < WARPS ? s.warp_sums[room][lane()] : 0);
  u64 before = __shfl_sync(ALL_LANES, sums, (warp() + 31) & 31), total = __shfl_sync(ALL_LANES, sums, 31);
  return {inclusive + (warp() ? before : 0), total};
}

struct Prefix { int index; u64 before, inclusive; };

// By one warp: n values in 32 slices, a lane each, and the prefix sums (from base on) of the slices.
struct Slices {
  int begin, end;
  u64 before, sum, total;

  template <class Value> DEVICE Slices(Value value, int n, u64 base) : sum(0) {
    int each = (n + 31) >> 5;
    begin = min(each * (int)lane(), n), end = min(begin + each, n);
#pragma unroll 1
    for (int i = begin; i < end; ++i) sum += value(i);
    u64 inclusive = base + warp_inclusive(sum);
    before = inclusive - sum, total = __shfl_sync(ALL_LANES, inclusive, 31);
  }
  // The first value whose inclusive prefix exceeds target.
  template <class Value> DEVICE Prefix locate(Value value, u64 target) const {
    bool here = before <= target && before + sum > target;
    int source = __ffs(__ballot_sync(ALL_LANES, here)) - 1, i = begin;
    u64 prefix = before, mine = 0;
    if (here)
#pragma unroll 1
      for (; prefix + (mine = value(i)) <= target; ++i) prefix += mine;
    prefix = __shfl_sync(ALL_LANES, prefix, source);
    return {__shfl_sync(ALL_LANES, i, source), prefix, prefix + __shfl_sync(ALL_LANES, mine, source)};
  }
};

template <class Value> DEVICE Prefix locate(Value value, int n, u64 base, u64 target) {
  return Slices(value, n, base).locate(value, target);
}

constexpr u32 MINUS_INFINITY_KEY = 0x007fffffu;  // key_of(-inf)

// By one warp: the smallest key that passes; all from some key on do, and top is one. 32 keys are tried at a time.
template <class Test> DEVICE u32 first_key(u32 top, Test passes) {
  u32 low = MINUS_INFINITY_KEY + 1, high = top;
  while (low < high) {
    u32 step = (high - low) / 32 + 1, probe = min((u64)low + (u64)step * lane(), (u64)high);
    int first = __ffs(__ballot_sync(ALL_LANES, passes(of_key(probe)))) - 1;
    if (first == 0) return low;
    u32 below = low + step * ((first < 0 ? 32 : first) - 1);
    if (first > 0) high = min((u64)low + (u64)step * first, (u64)high);
    low = below + 1;
  }
  return high;
}

// Sorts n <= 512 ranks, best first: every rank counts the better ones. No exchange, four barriers.
DEVICE void sort_by_counting(Shared& s, int n) {
  int bits = n > 32 ? 32 - __clz(n - 1) : 5, width = 1 << bits;
  int mine = threadIdx.x & (width - 1), stride = THREADS >> bits, first = threadIdx.x >> bits;
  if (threadIdx.x < width) s.places[threadIdx.x] = 0;
  __syncthreads();
  u64 rank = mine < n ? s.ranks[mine] : 0;
  int better = 0;
  if (first < stride)
    for (int other = first; other < n; other += stride) better += s.ranks[other] > rank;
  if (mine < n && better) atomicAdd(&s.places[mine], better);
  __syncthreads();
  int place = s.places[mine];
  __syncthreads();
  if ((int)threadIdx.x < n) s.ranks[place] = rank;
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
  if (n <= min(512, THREADS)) sort_by_counting(s, n);
  else sort_bitonic(s, n);
}

// Masses of the n sorted ranks; from the limit-th on (top_k) they are 0, like those min_p cuts. One barrier.
DEVICE void weigh_sorted(Shared& s, int n, int limit, const Depths& depths) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += THREADS)
    s.mass[i] = i < limit ? mass_of(depths.of(of_key((u32)(s.ranks[i] >> 32)))) : 0;
  __syncthreads();
}
