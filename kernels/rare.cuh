// The searches that are right for every row and fast for none, by the first block alone: a large top_k, and bins with
// more entries than can be sorted at once.
#pragma once
#include "bins.cuh"

// Inline: a call would wait for all the loads that are in flight.
DEVICE void push(Shared& first, u64 rank) {
  int place = atomicAdd(&first.found, 1);
  if (place < CAPACITY) first.ranks[place] = rank;
}

// Part of one bin: its ranks from high down to low.
struct Part { int bin; u64 high, low; };

// The part's entries into s.ranks; their number, which may exceed CAPACITY. The first block alone.
template <class L> RARELY int collect_part(L z, Shared& s, Depths depths, Part part) {
  if (threadIdx.x == 0) s.found = 0;
  __syncthreads();
  every_entry(z, [&](float x, int id) {
    float depth = depths.of(x);
    u64 rank = rank_of(x, id);
    if (bin_of(depth) == part.bin && depth < DEEPEST && rank >= part.low && rank <= part.high) push(s, rank);
  });
  __syncthreads();
  return s.found;
}

template <class L> RARELY void fill_fine_bins(L z, Shared& s, Depths depths, Part part, int shift) {
  for (int b = threadIdx.x; b < 1 << FINE_BITS; b += THREADS) s.fine.mass[b] = {0, 0}, s.fine.count[b] = 0;
  __syncthreads();
  every_entry(z, [&](float x, int id) {
    float depth = depths.of(x);
    u64 rank = rank_of(x, id);
    if (bin_of(depth) != part.bin || depth >= DEEPEST || rank < part.low || rank > part.high) return;
    u32 b = (u32)((part.high - rank) >> shift);
    s.fine.mass[b].add(mass_of(depth));
    atomicAdd(&s.fine.count[b], 1u);
  });
  __syncthreads();
}

// Masses and numbers before some entry.
struct Before { u64 mass, count; };

// Sorts the entries of one bin around the target (an inclusive prefix of masses, or of numbers) into s.ranks and
// s.mass; s.found of them; what lies before them. A bin too full to sort is split by its ranks' highest bits, ten at
// a time, until the part that holds the target fits: ties by the thousand. The first block alone; rare.
template <class L>
RARELY Before open_bin(L z, Shared& s, Depths depths, int bin, Before before, u64 target, bool counting) {
  Part part = {bin, ~0ull, 0};
  int shift = 64 - FINE_BITS, n = collect_part(z, s, depths, part);
  while (n > CAPACITY) {
    fill_fine_bins(z, s, depths, part, shift);
    const FineBins& fine = s.fine;
    auto mass = [&](int b) { return fine.mass[b].value(); };
    auto count = [&](int b) { return (u64)fine.count[b]; };
    Prefix p = counting ? locate(count, 1 << FINE_BITS, before.count, target) : locate(mass, 1 << FINE_BITS, before.mass, target);
    for (int b = 0; b < p.index; ++b) before.mass += mass(b), before.count += count(b);
    part.high -= (u64)p.index << shift;
    part.low = part.high - ((1ull << shift) - 1);
    shift = max(shift - FINE_BITS, 0);
    __syncthreads();
    n = collect_part(z, s, depths, part);
  }
  sort_best_first(s, n);
  weigh_sorted(s, n, n, depths);
  return before;
}

// The entry at which the inclusive prefix of masses first exceeds target: its id in s.token; that prefix.
template <class L> RARELY u64 find_by_mass(L z, Shared& s, Depths depths, u64 target) {
  MyBins(s).locate(target, &s.spots[0]);
  __syncthreads();
  Spot spot = s.spots[0];
  Before before = open_bin(z, s, depths, spot.bin, {spot.before, 0}, target, false);
  Prefix p = locate([&](int i) { return s.mass[i]; }, s.found, before.mass, target);
  if (threadIdx.x == 0) s.token = (int)id_of(s.ranks[p.index]);
  __syncthreads();
  return p.inclusive;
}

// The mass of the best `number` entries, or of all when there are fewer. Overwrites the bins by counts.
template <class L> RARELY u64 mass_of_best(L z, Shared& s, Depths depths, u64 all, u64 number) {
  MyBins masses(s);
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.bin_count[b] = 0;
  __syncthreads();
  every_entry(z, [&](float x, int) {
    float depth = depths.of(x);
    if (depth < DEEPEST) atomicAdd(&s.bin_count[bin_of(depth)], 1u);
  });
  __syncthreads();
  u64 total = 0;
  for (int b = 0; b < BINS; ++b) total += s.bin_count[b];
  if (number >= total) return all;
  Prefix p = locate([&](int b) { return (u64)s.bin_count[b]; }, BINS, 0, number - 1);
  u64 before_mass = masses.before;
#pragma unroll
  for (int e = 0; e < MyBins::EACH; before_mass += masses.mass[e++])
    if ((int)(MyBins::EACH * threadIdx.x + e) == p.index) s.spots[0].before = before_mass;
  __syncthreads();
  Before before = open_bin(z, s, depths, p.index, {s.spots[0].before, p.before}, number - 1, true);
  u64 mass = Slices([&](int i) { return s.mass[i]; }, (int)(number - before.count), before.mass).total;
  __syncthreads();
  return mass;
}

template <class L> RARELY void fill_all(L z, Shared& s, Depths depths) {
  clear_bins(s);
  __syncthreads();
  fill_near_slowly(z, s, Team{0, 1}, depths, Near(BINS));
  __syncthreads();
}

// One search after the other, by the first block alone: right for every row, fast for none. The token in s.token.
template <class L> RARELY void draw_alone(L z, Shared& s, Depths depths, u64 uniform) {
  fill_all(z, s, depths);
  u64 kept = MyBins(s).total;
  __syncthreads();
  if (s.row.top_k) {
    kept = mass_of_best(z, s, depths, kept, s.row.top_k);
    fill_all(z, s, depths);
  }
  if (s.row.top_p < TOP_P_OFF) kept = find_by_mass(z, s, depths, nucleus_end(kept, s.row.top_p));
  find_by_mass(z, s, depths, __umul64hi(uniform, kept));
}

