// Draws that need the whole row's masses: no filter, top_p alone, a large top_k, or more candidates than fit.
// A team of blocks works on the row: the whole cluster, or the first block alone once the others have left.
#pragma once
#include "pick.cuh"

struct Team {
  u32 rank, size;
  DEVICE void sync() const {
    if (size > 1) cluster_sync();
    else __syncthreads();
  }
};

// ------------------------------------------------------------------------------------------- in id order

//   strips   256 ids, one warp each, whose masses go to the first block
//   chunks   4 strips: 1,024 ids
// The sum of the lanes' masses, each below 2^48: two 32-bit sums, which the hardware has.
DEVICE u64 warp_sum(u64 mass) {
  u64 low = __reduce_add_sync(ALL_LANES, (u32)mass & 0xffffffu), high = __reduce_add_sync(ALL_LANES, (u32)(mass >> 24));
  return low + (high << 24);
}

// One lane's vectors of a strip; the last only where the row is not aligned. Partial vectors are read later.
struct Strip {
  static constexpr int VECTORS = (1 << STRIP_BITS) / 4 / 32 + 1;
  int begin, end, first;
  Four f[VECTORS];

  template <class L> DEVICE void load(const L& z, int strip) {
    begin = strip << STRIP_BITS, end = min(begin + (1 << STRIP_BITS), z.size), first = ((begin + z.shift) >> 2) + lane();
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int v = first + 32 * u;
      f[u] = z.full(v) && z.id(v, 0) < end ? z.load_full(v) : NOTHING;
    }
  }
  template <bool PLAIN, class L> DEVICE u64 mass(const L& z, const Levels& levels) {
    u64 sum = 0;
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int id = z.id(first + 32 * u, 0);
      if (id >= end) break;
      if (!z.full(first + 32 * u)) f[u] = z.load_partial(first + 32 * u);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u64 m = mass_of(levels.of<PLAIN>(f[u].x[j]));
        sum += id + j >= begin && id + j < end ? m : 0;
      }
    }
    return sum;
  }
};

template <bool PLAIN, class L> DEVICE void sum_strips(const L& z, Shared& s, const Team& team, const Levels& levels, int strips) {
  int strip = team.rank * WARPS + warp(), stride = team.size * WARPS;
  Strip mine, next;
  mine.load(z, strip);
#pragma unroll 1
  for (; strip < strips; strip += stride) {
    next.load(z, strip + stride);
    u64 mass = warp_sum(mine.mass<PLAIN>(z, levels));
    if (lane() == 0) *at_rank(&s.strip_mass[strip], 0) = mass;
    mine = next;
  }
}

// A chunk by its mass, then an id within it. The token in the first block's s.token.
template <class L> DEVICE void draw_by_id(const L& z, Shared& s, const Team& team, const Levels& levels) {
  int strips = (z.size + (1 << STRIP_BITS) - 1) >> STRIP_BITS;
  if (levels.plain()) sum_strips<true>(z, s, team, levels, strips);
  else sum_strips<false>(z, s, team, levels, strips);
  team.sync();
  if (team.rank) return;
  u64 mass = 0;
  for (int i = 4 * threadIdx.x; i < min(4 * (int)threadIdx.x + 4, strips); ++i) mass += s.strip_mass[i];
  Sums sums = block_inclusive(mass, s, 0);
  u64 target = __umul64hi(s.uniform.first, sums.total);
  if (sums.inclusive > target && sums.inclusive - mass <= target) s.chunk = threadIdx.x, s.spots[0].mass = mass;
  __syncthreads();
  int begin = s.chunk << CHUNK_BITS, end = min(begin + (1 << CHUNK_BITS), z.size);
  target = __umul64hi(s.uniform.second, s.spots[0].mass);
  constexpr int EACH = (1 << CHUNK_BITS) / THREADS;
  u64 masses[EACH], sum = 0;
  for (int j = 0; j < EACH; ++j) {
    int id = begin + EACH * threadIdx.x + j;
    sum += masses[j] = id < end ? mass_of(levels.of(z.at(id))) : 0;
  }
  u64 before = block_inclusive(sum, s, 1).inclusive - sum;
  for (int j = 0; j < EACH; before += masses[j++])
    if (before <= target && before + masses[j] > target) s.token = begin + EACH * threadIdx.x + j;
  __syncthreads();
}

// ------------------------------------------------------------------------------------------- in rank order

DEVICE u64 bin_mass(const u32* low, const u32* high, int b) { return (u64)high[b] << 32 | low[b]; }

// Adds a 42-bit mass to two words: the carry is whoever's addition overflows, so the sum is exact in any order.
DEVICE void add_mass(u32* low, u32* high, u64 mass) {
  u32 part = (u32)mass, old = atomicAdd(low, part), carry = (u32)(mass >> 32) + (old + part < old);
  if (carry) atomicAdd(high, carry);
}

// Calls visit(four entries, the first's id) for the team's share of the row, AHEAD loads in flight; at the end also
// with entries of -inf that are none. The row's partial vectors, at most two, come last.
template <class L, class Visit> DEVICE void every_four(const L& z, const Team& team, Visit visit) {
  int first = team.rank * THREADS + threadIdx.x, stride = team.size * THREADS;
  Four f[AHEAD];
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) f[u] = z.full(first + u * stride) ? z.load_full(first + u * stride) : NOTHING;
#pragma unroll 1
  for (int v = first; v < z.full_end; v += AHEAD * stride) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      int at = v + u * stride, next = at + AHEAD * stride;
      visit(f[u], z.id(at, 0));
      f[u] = next < z.full_end ? z.load_full(next) : NOTHING;
    }
  }
  if (first == 0 && z.full_begin > 0) visit(z.load_partial(0), z.id(0, 0));
  if (first == 1 && z.full_end < z.vectors && z.full_end >= z.full_begin) visit(z.load_partial(z.full_end), z.id(z.full_end, 0));
}

template <class L, class Visit> DEVICE void every_entry(const L& z, const Team& team, Visit visit) {
  every_four(z, team, [&](Four f, int id) {
#pragma unroll
    for (int j = 0; j < 4; ++j) visit(f.x[j], id + j);
  });
}

template <bool PLAIN, class L> DEVICE void sum_bins(const L& z, Shared& s, const Team& team, const Levels& levels) {
  every_four(z, team, [&](Four f, int) {
    u32 level[4];
    u64 mass[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) level[j] = levels.of<PLAIN>(f.x[j]), mass[j] = mass_of(level[j]);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (mass[j]) add_mass(&s.bins.low[level[j] >> BIN_SHIFT], &s.bins.high[level[j] >> BIN_SHIFT], mass[j]);
  });
}

//  bins       best ............................................ 42 octaves below
//  every block sums its share of the row; then block r adds up slice r of all blocks' bins into the first block's
template <class L> DEVICE void fill_bins(const L& z, Shared& s, const Team& team, const Levels& levels) {
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.bins.low[b] = s.bins.high[b] = 0;
  __syncthreads();
  if (levels.plain()) sum_bins<true>(z, s, team, levels);
  else sum_bins<false>(z, s, team, levels);
  team.sync();
  if (team.size == 1) return;
  int slice = (BINS + team.size - 1) / team.size, begin = team.rank * slice;
  for (int b = begin + threadIdx.x; b < min(begin + slice, BINS); b += THREADS) {
    u64 mass = 0;
    for (u32 r = 0; r < team.size; ++r) {
      const Bins& theirs = *at_rank(&s.bins, r);
      mass += bin_mass(theirs.low, theirs.high, b);
    }
    Bins& first = *at_rank(&s.bins, 0);
    first.low[b] = (u32)mass, first.high[b] = (u32)(mass >> 32);
  }
  team.sync();
}

// A thread's few neighbouring bins and the mass before them.
struct MyBins {
  static constexpr int EACH = (BINS + THREADS - 1) / THREADS;
  u64 mass[EACH], before, total;

  DEVICE explicit MyBins(Shared& s) {
    u64 sum = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int b = EACH * threadIdx.x + e;
      sum += mass[e] = b < BINS ? bin_mass(s.bins.low, s.bins.high, b) : 0;
    }
    Sums sums = block_inclusive(sum, s, 0);
    before = sums.inclusive - sum, total = sums.total;
  }
  // The bin in which the inclusive prefix first exceeds target, into *spot, by whichever thread holds it.
  DEVICE void locate(u64 target, Spot* spot) const {
    u64 prefix = before;
#pragma unroll
    for (int e = 0; e < EACH; prefix += mass[e++])
      if (prefix <= target && prefix + mass[e] > target) *spot = {(int)(EACH * threadIdx.x + e), prefix, mass[e]};
  }
};

DEVICE void push(Shared& first, u64 rank) {
  int place = atomicAdd(&first.found, 1);
  if (place < CAPACITY) first.ranks[place] = rank;
}

// Part of one bin: its ranks from high down to low.
struct Part { int bin; u64 high, low; };

// The part's entries into s.ranks; their number, which may exceed CAPACITY. The first block alone.
template <class L> RARELY int collect_part(L z, Shared& s, Levels levels, Part part) {
  if (threadIdx.x == 0) s.found = 0;
  __syncthreads();
  every_entry(z, Team{0, 1}, [&](float x, int id) {
    u32 level = levels.of(x);
    u64 rank = rank_of(x, id);
    if ((int)(level >> BIN_SHIFT) == part.bin && mass_of(level) && rank >= part.low && rank <= part.high) push(s, rank);
  });
  __syncthreads();
  return s.found;
}

template <class L> RARELY void fill_fine_bins(L z, Shared& s, Levels levels, Part part, int shift) {
  for (int b = threadIdx.x; b < 1 << FINE_BITS; b += THREADS) s.fine.low[b] = s.fine.high[b] = s.fine.count[b] = 0;
  __syncthreads();
  every_entry(z, Team{0, 1}, [&](float x, int id) {
    u32 level = levels.of(x);
    u64 rank = rank_of(x, id), mass = mass_of(level);
    if ((int)(level >> BIN_SHIFT) != part.bin || mass == 0 || rank < part.low || rank > part.high) return;
    u32 b = (u32)((part.high - rank) >> shift);
    add_mass(&s.fine.low[b], &s.fine.high[b], mass);
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
RARELY Before open_bin(L z, Shared& s, Levels levels, int bin, Before before, u64 target, bool counting) {
  Part part = {bin, ~0ull, 0};
  int shift = 64 - FINE_BITS, n = collect_part(z, s, levels, part);
  while (n > CAPACITY) {
    fill_fine_bins(z, s, levels, part, shift);
    const FineBins& fine = s.fine;
    auto mass = [&](int b) { return bin_mass(fine.low, fine.high, b); };
    auto count = [&](int b) { return (u64)fine.count[b]; };
    Prefix p = counting ? locate(count, 1 << FINE_BITS, before.count, target) : locate(mass, 1 << FINE_BITS, before.mass, target);
    for (int b = 0; b < p.index; ++b) before.mass += mass(b), before.count += count(b);
    part.high -= (u64)p.index << shift;
    part.low = part.high - ((1ull << shift) - 1);
    shift = max(shift - FINE_BITS, 0);
    __syncthreads();
    n = collect_part(z, s, levels, part);
  }
  sort_best_first(s, n);
  weigh_sorted(s, n, n, levels);
  return before;
}

// The entry at which the inclusive prefix of masses first exceeds target: its id in s.token; that prefix.
template <class L> RARELY u64 find_by_mass(L z, Shared& s, Levels levels, u64 target) {
  MyBins(s).locate(target, &s.spots[0]);
  __syncthreads();
  Spot spot = s.spots[0];
  Before before = open_bin(z, s, levels, spot.bin, {spot.before, 0}, target, false);
  Prefix p = locate([&](int i) { return s.mass[i]; }, s.found, before.mass, target);
  if (threadIdx.x == 0) s.token = (int)id_of(s.ranks[p.index]);
  __syncthreads();
  return p.inclusive;
}

// The mass of the best `number` entries, or of all when there are fewer. Overwrites the bins by counts.
template <class L> RARELY u64 mass_of_best(L z, Shared& s, Levels levels, u64 all, u64 number) {
  MyBins masses(s);
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.bin_count[b] = 0;
  __syncthreads();
  every_entry(z, Team{0, 1}, [&](float x, int) {
    u32 level = levels.of(x);
    if (mass_of(level)) atomicAdd(&s.bin_count[level >> BIN_SHIFT], 1u);
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
  Before before = open_bin(z, s, levels, p.index, {s.spots[0].before, p.before}, number - 1, true);
  u64 mass = Slices([&](int i) { return s.mass[i]; }, (int)(number - before.count), before.mass).total;
  __syncthreads();
  return mass;
}

// One search after the other, by the first block alone: right for every row, fast for none. The token in s.token.
template <class L> RARELY void draw_alone(L z, Shared& s, Levels levels, u64 uniform) {
  u64 kept = MyBins(s).total;
  __syncthreads();
  if (s.row.top_k) {
    kept = mass_of_best(z, s, levels, kept, s.row.top_k);
    fill_bins(z, s, Team{0, 1}, levels);
  }
  if (s.row.top_p < TOP_P_OFF) kept = find_by_mass(z, s, levels, nucleus_end(kept, s.row.top_p));
  find_by_mass(z, s, levels, __umul64hi(uniform, kept));
}

// The entries within the limits, to the first block.
template <class L> DEVICE void collect_within(const L& z, const Shared& s, Shared& first, const Team& team) {
  float a = s.limits[0], b = s.limits[1], c = s.limits[2], d = s.limits[3];
  every_entry(z, team, [&](float x, int id) {
    if ((x >= a && x <= b) || (x >= c && x <= d)) push(first, rank_of(x, id));
  });
}

// By one warp: the value from which on (which = 0), or up to which (1), an entry lies in bins low ... high.
DEVICE float limit_of(const Levels& levels, u32 top_key, int low, int high, int which) {
  if (which == 0) return of_key(first_key(levels, top_key, (u32)((high + 1) << BIN_SHIFT) - 1));
  return low ? of_key(first_key(levels, top_key, (u32)(low << BIN_SHIFT) - 1) - 1) : INFINITE;
}

// top_p (and min_p) without top_k, by the whole team. The bins say where the nucleus ends and, but for that bin's
// inside, what it holds: so they also say which bin, at most a few, the draw can fall into. One pass collects both,
// and the first block sorts them. The token in the first block's s.token.
template <class L>
DEVICE void draw_together(const L& z, Shared& s, const Team& team, const Levels& levels, u32 top_key, u64 uniform) {
  u64 end = 0;
  if (team.rank == 0) {
    MyBins bins(s);
    end = s.row.top_p < TOP_P_OFF ? nucleus_end(bins.total, s.row.top_p) : bins.total - 1;
    bins.locate(end, &s.spots[0]);
    if (threadIdx.x == 0) s.found = s.num_last = s.num_draw = 0;
    __syncthreads();
    Spot last = s.spots[0];
    bins.locate(__umul64hi(uniform, last.before + 1), &s.spots[1]);
    bins.locate(__umul64hi(uniform, last.before + last.mass), &s.spots[2]);
    __syncthreads();
    if (warp() < 4) {
      int low = warp() < 2 ? last.bin : s.spots[1].bin, high = warp() < 2 ? last.bin : s.spots[2].bin;
      float limit = limit_of(levels, top_key, low, high, warp() & 1);
      if (lane() < team.size) *at_rank(&s.limits[warp()], lane()) = limit;
    }
  }
  team.sync();
  collect_within(z, s, *at_rank(&s, 0), team);
  team.sync();
  if (team.rank) return;
  int n = s.found;
  if (n > CAPACITY) return draw_alone(z, s, levels, uniform);
  sort_best_first(s, n);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += THREADS) {
    u32 level = levels.of(of_key((u32)(s.ranks[i] >> 32)));
    int bin = (int)(level >> BIN_SHIFT);
    s.mass[i] = mass_of(level);
    if (bin == s.spots[0].bin) atomicAdd(&s.num_last, 1);
    if (bin >= s.spots[1].bin && bin <= s.spots[2].bin) atomicAdd(&s.num_draw, 1);
  }
  __syncthreads();
  if (warp() == 0) {
    int skipped = n - s.num_last;
    u64 kept = locate([&](int i) { return s.mass[skipped + i]; }, s.num_last, s.spots[0].before, end).inclusive;
    Prefix drawn = locate([&](int i) { return s.mass[i]; }, s.num_draw, s.spots[1].before, __umul64hi(uniform, kept));
    if (lane() == 0) s.token = (int)id_of(s.ranks[drawn.index]);
  }
  __syncthreads();
}
