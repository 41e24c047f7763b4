// Draws that need the whole row's masses: no filter, top_p alone, a large top_k, or more candidates than fit.
// A team of blocks works on the row: the whole cluster, or the first block alone once the others have left.
#pragma once
#include "pick.cuh"

struct Team {
  u32 rank, size;
  DEVICE void sync() const {
    if (size > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
  }
};

// ------------------------------------------------------------------------------------------- in id order

// A chunk of 1,024 ids by its mass, then an id within it. One warp sums a chunk. The token, in the first block.
template <class L> DEVICE int draw_by_id(const L& z, Shared& s, const Team& team, float top, Uniforms uniform) {
  int chunks = (z.size + (1 << CHUNK_BITS) - 1) >> CHUNK_BITS;
  for (int c = team.rank * WARPS + warp(); c < chunks; c += team.size * WARPS) {
    int begin = c << CHUNK_BITS, end = min(begin + (1 << CHUNK_BITS), z.size);
    u64 mass = 0;
    for (int v = ((begin + z.shift) >> 2) + lane(); z.id(v, 0) < end; v += 32) {
      Four f = z.load(v);
      for (int j = 0; j < 4; ++j)
        if (z.id(v, j) >= begin && z.id(v, j) < end) mass += mass_of(level_of(f.x[j], top, s.row));
    }
    for (int step = 16; step > 0; step >>= 1) mass += __shfl_xor_sync(ALL_LANES, mass, step);
    if (lane() == 0) *at_rank(&s.chunk_mass[c], 0) = mass;
  }
  team.sync();
  if (team.rank) return -1;
  u64 mass = (int)threadIdx.x < chunks ? s.chunk_mass[threadIdx.x] : 0, total;
  u64 inclusive = block_inclusive(mass, s, total), target = __umul64hi(uniform.first, total);
  if (inclusive > target && inclusive - mass <= target) s.bin = threadIdx.x, s.kept = mass;
  __syncthreads();
  int begin = s.bin << CHUNK_BITS, end = min(begin + (1 << CHUNK_BITS), z.size);
  target = __umul64hi(uniform.second, s.kept);
  u64 base = 0;
  for (int start = begin; start < end; start += THREADS) {
    int id = start + threadIdx.x;
    mass = id < end ? mass_of(level_of(z.at(id), top, s.row)) : 0;
    inclusive = base + block_inclusive(mass, s, total);
    if (inclusive > target && inclusive - mass <= target) s.token = id;
    base += total;
  }
  __syncthreads();
  return s.token;
}

// ------------------------------------------------------------------------------------------- in rank order

// Adds a 42-bit mass to two words: the carry is whoever's addition overflows, so the sum is exact in any order.
DEVICE void add_mass(u32* low, u32* high, u64 mass) {
  u32 part = (u32)mass, old = atomicAdd(low, part), carry = (u32)(mass >> 32) + (old + part < old);
  if (carry) atomicAdd(high, carry);
}

template <class L, class Visit> DEVICE void every_entry(const L& z, const Team& team, Visit visit) {
  for (int v = team.rank * THREADS + threadIdx.x; v < z.vectors; v += team.size * THREADS) {
    Four f = z.load(v);
    for (int j = 0; j < 4; ++j) visit(f.x[j], z.id(v, j));
  }
}

//  bins       best ............................................ 42 octaves below
//  every block sums its share of the row; then block r adds up slice r of all blocks' bins into the first block's
template <class L> DEVICE void fill_bins(const L& z, Shared& s, const Team& team, float top) {
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.bins.low[b] = s.bins.high[b] = s.bins.count[b] = 0;
  __syncthreads();
  every_entry(z, team, [&](float x, int) {
    u32 level = level_of(x, top, s.row);
    u64 mass = mass_of(level);
    if (mass == 0) return;
    add_mass(&s.bins.low[level >> BIN_SHIFT], &s.bins.high[level >> BIN_SHIFT], mass);
    atomicAdd(&s.bins.count[level >> BIN_SHIFT], 1u);
  });
  team.sync();
  if (team.size == 1) return;
  int slice = (BINS + team.size - 1) / team.size, begin = team.rank * slice;
  for (int b = begin + threadIdx.x; b < min(begin + slice, BINS); b += THREADS) {
    u64 mass = 0;
    u32 count = 0;
    for (u32 r = 0; r < team.size; ++r) {
      const Bins& theirs = *at_rank(&s.bins, r);
      mass += (u64)theirs.high[b] << 32 | theirs.low[b];
      count += theirs.count[b];
    }
    Bins& first = *at_rank(&s.bins, 0);
    first.low[b] = (u32)mass, first.high[b] = (u32)(mass >> 32), first.count[b] = count;
  }
  team.sync();
}

struct Found { int bin; u64 before, inside; u32 count_before, count; };

DEVICE u64 bin_mass(const u32* low, const u32* high, int b) { return (u64)high[b] << 32 | low[b]; }

// The bin in which the inclusive prefix of masses (or of counts) first exceeds target.
DEVICE Found locate_bin(Shared& s, const u32* low, const u32* high, const u32* count, int bins, u64 target, bool counts) {
  int each = (bins + THREADS - 1) / THREADS, begin = threadIdx.x * each, end = min(begin + each, bins);
  u64 mass = 0, number = 0, total;
  for (int b = begin; b < end; ++b) mass += bin_mass(low, high, b), number += count[b];
  u64 mass_before = block_inclusive(mass, s, total) - mass;
  u64 number_before = block_inclusive(number, s, total) - number;
  for (int b = begin; b < end; ++b) {
    u64 m = bin_mass(low, high, b), c = count[b], before = counts ? number_before : mass_before;
    if (before <= target && before + (counts ? c : m) > target) s.bin = b, s.before = mass_before, s.kept = number_before;
    mass_before += m, number_before += c;
  }
  __syncthreads();
  Found f = {s.bin, s.before, bin_mass(low, high, s.bin), (u32)s.kept, count[s.bin]};
  __syncthreads();
  return f;
}

DEVICE Found locate_bin(Shared& s, u64 target, bool counts) {
  return locate_bin(s, s.bins.low, s.bins.high, s.bins.count, BINS, target, counts);
}

DEVICE void push(Shared& first, u64 rank) {
  int place = atomicAdd(&first.found, 1);
  if (place < CAPACITY) first.ranks[place] = rank;
}

// A bin too full to sort: halve nothing, but split its ranks by their highest differing bits, ten at a time, until
// what holds the target fits. The first block alone; rare (ties by the thousand). Sorted entries end in s.ranks.
template <class L> RARELY Found narrow(const L& z, Shared& s, float top, Found f, u64 target, bool counts) {
  Team alone = {0, 1};
  int bin = f.bin;
  u64 high = ~0ull, low = 0;
  int shift = 64 - FINE_BITS;
  while (f.count > CAPACITY) {
    for (int b = threadIdx.x; b < 1 << FINE_BITS; b += THREADS) s.fine.low[b] = s.fine.high[b] = s.fine.count[b] = 0;
    __syncthreads();
    every_entry(z, alone, [&](float x, int id) {
      u32 level = level_of(x, top, s.row);
      u64 rank = rank_of(x, id), mass = mass_of(level);
      if ((int)(level >> BIN_SHIFT) != bin || mass == 0 || rank < low || rank > high) return;
      u32 b = (u32)((high - rank) >> shift);
      add_mass(&s.fine.low[b], &s.fine.high[b], mass);
      atomicAdd(&s.fine.count[b], 1u);
    });
    __syncthreads();
    u64 rest = target - (counts ? f.count_before : f.before);
    Found in = locate_bin(s, s.fine.low, s.fine.high, s.fine.count, 1 << FINE_BITS, rest, counts);
    high -= (u64)in.bin << shift, low = high - ((1ull << shift) - 1);
    shift = max(shift - FINE_BITS, 0);
    f = {bin, f.before + in.before, in.inside, f.count_before + in.count_before, in.count};
  }
  if (threadIdx.x == 0) s.found = 0;
  __syncthreads();
  every_entry(z, alone, [&](float x, int id) {
    u32 level = level_of(x, top, s.row);
    u64 rank = rank_of(x, id);
    if ((int)(level >> BIN_SHIFT) == bin && mass_of(level) && rank >= low && rank <= high) push(s, rank);
  });
  __syncthreads();
  sort_best_first(s, (int)f.count);
  weigh_sorted(s, (int)f.count, (int)f.count, top);
  return f;
}

// The entry at which the inclusive prefix of masses first exceeds target: its id in s.token, that prefix in s.kept.
template <class L> RARELY void find_by_mass(const L& z, Shared& s, float top, u64 target) {
  Found f = narrow(z, s, top, locate_bin(s, target, false), target, false);
  locate_sorted(s, 0, (int)f.count, f.before, target);
}

// The mass of the best `number` entries.
template <class L> RARELY u64 mass_of_best(const L& z, Shared& s, float top, u32 number) {
  Found f = narrow(z, s, top, locate_bin(s, number - 1, true), number - 1, true);
  return f.before + weigh_sorted(s, (int)f.count, (int)(number - f.count_before), top);
}

struct Totals { u64 mass; u64 count; };

DEVICE Totals totals(Shared& s) {
  u64 mass = 0, count = 0;
  for (int b = threadIdx.x; b < BINS; b += THREADS) mass += bin_mass(s.bins.low, s.bins.high, b), count += s.bins.count[b];
  Totals t;
  block_inclusive(mass, s, t.mass);
  block_inclusive(count, s, t.count);
  return t;
}

// One search after the other, by the first block alone: right for every row, fast for none.
template <class L> RARELY int draw_alone(const L& z, Shared& s, float top, u64 uniform) {
  Totals all = totals(s);
  u64 kept = all.mass;
  if (s.row.top_k && (u64)s.row.top_k < all.count) kept = mass_of_best(z, s, top, s.row.top_k);
  if (s.row.top_p < TOP_P_OFF) {
    find_by_mass(z, s, top, nucleus_end(kept, s.row.top_p));
    kept = s.kept;
    __syncthreads();
  }
  find_by_mass(z, s, top, __umul64hi(uniform, kept));
  return s.token;
}

// top_p (and min_p) without top_k, by the whole team. The bins say where the nucleus ends and, but for that bin's
// inside, what it holds: so they also say which bin, at most a few, the draw can fall into. One pass collects
// both, and the first block sorts them.
template <class L> DEVICE int draw_together(const L& z, Shared& s, const Team& team, float top, u64 uniform) {
  Found last = {0, 0, 0, 0, 0}, from = last, to = last;
  u64 end = 0;
  bool fits = true;
  if (team.rank == 0) {
    u64 all = totals(s).mass;
    end = s.row.top_p < TOP_P_OFF ? nucleus_end(all, s.row.top_p) : all - 1;
    last = locate_bin(s, end, false);
    from = locate_bin(s, __umul64hi(uniform, last.before + 1), false);
    to = locate_bin(s, __umul64hi(uniform, last.before + last.inside), false);
    u32 between = to.count_before + to.count - from.count_before;
    fits = (to.bin == last.bin ? between : between + last.count) <= CAPACITY;
    if (threadIdx.x == 0) s.found = 0, s.bin = fits ? last.bin : -1, s.draw_low = from.bin, s.draw_high = to.bin;
  }
  team.sync();
  Shared& first = *at_rank(&s, 0);
  int wanted = first.bin, low = first.draw_low, high = first.draw_high;
  if (wanted >= 0)
    every_entry(z, team, [&](float x, int id) {
      u32 level = level_of(x, top, s.row);
      int bin = (int)(level >> BIN_SHIFT);
      if ((bin == wanted || (bin >= low && bin <= high)) && mass_of(level)) push(first, rank_of(x, id));
    });
  team.sync();
  if (team.rank) return -1;
  if (!fits) return draw_alone(z, s, top, uniform);
  int n = s.found;
  sort_best_first(s, n);
  weigh_sorted(s, n, n, top);
  locate_sorted(s, n - (int)last.count, (int)last.count, last.before, end);
  u64 kept = s.kept;
  __syncthreads();
  locate_sorted(s, 0, (int)(to.count_before + to.count - from.count_before), from.before, __umul64hi(uniform, kept));
  return s.token;
}
