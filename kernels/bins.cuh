// The masses of a row by bins of 1/32 octave, and the walk over the row that fills them.
// A team of blocks works on it: the whole cluster, or the first block alone once the others have left.
#pragma once
#include "block.cuh"
#include "logits.cuh"

struct Team {
  u32 rank, size;
  DEVICE void sync() const {
    if (size > 1) cluster_sync();
    else __syncthreads();
  }
};

// The team's share of a row, four entries at a time. LOADS loads are in flight from the start, so a walk can be begun
// before what it waits for is there.
template <class L, int LOADS = 1> struct Walk {
  const L& z;
  int first, stride;
  Four f[LOADS];

  DEVICE Walk(const L& z, const Team& team) : z(z), first(team.rank * THREADS + threadIdx.x), stride(team.size * THREADS) {
#pragma unroll
    for (int u = 0; u < LOADS; ++u) f[u] = z.full(first + u * stride) ? z.load_full(first + u * stride) : NOTHING;
  }
  // Calls visit(four entries, the first's id), at the end also with entries of -inf that are none. The row's partial
  // vectors, at most two, come last.
  template <class Visit> DEVICE void run(Visit visit) {
#pragma unroll 1
    for (int v = first; v < z.full_end; v += LOADS * stride) {
#pragma unroll
      for (int u = 0; u < LOADS; ++u) {
        int at = v + u * stride, next = at + LOADS * stride;
        visit(f[u], z.id(at, 0));
        f[u] = next < z.full_end ? z.load_full(next) : NOTHING;
      }
    }
    if (first == 0 && z.full_begin > 0) visit(z.load_partial(0), z.id(0, 0));
    if (first == 1 && z.full_end < z.vectors && z.full_end >= z.full_begin)
      visit(z.load_partial(z.full_end), z.id(z.full_end, 0));
  }
};

// By the first block alone.
template <class L, class Visit> DEVICE void every_entry(const L& z, Visit visit) {
  Walk<L>(z, Team{0, 1}).run([&](Four f, int id) {
#pragma unroll
    for (int j = 0; j < 4; ++j) visit(f.x[j], id + j);
  });
}

DEVICE void clear_bins(Shared& s) {
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.bins[b] = {0, 0};
}

// The bins near the maximum. Some 7,000 of a row's entries reach the smallest of 1,024 group maxima, whatever the row
// (1,024 ln 1,024 of independent ones): as many as nuclei have, few enough to keep. An even number of bins, or all:
// a depth on the border between two rounds to the even one, so what is not below this border is no near bin's.
struct Near {
  int bins;
  float depth;  // where they end

  DEVICE explicit Near(int wanted) : bins(min((wanted + 1) & ~1, BINS)), depth((bins - 0.5f) / (64 * 32)) {}
  DEVICE bool has(float other) const { return other < depth; }
};

DEVICE void add_near(Mass* bins, Near near, float depth) {
  if (near.has(depth)) bins[bin_of(depth)].add(mass_of(depth));
}

RARELY void add_four_near(Mass* bins, Near near, float a, float b, float c, float d) {
  add_near(bins, near, a), add_near(bins, near, b), add_near(bins, near, c), add_near(bins, near, d);
}

// What a thread found in its share of a row: the mass of all of it; how many near entries it keeps; whether there were
// more, which only the bins know of.
struct Found { u64 mass; int kept; bool crowded; };

// Near entries are few. So the walk only keeps them, without a branch an entry, and they go to the bins afterwards. Where
// nothing is kept they go there at once.
template <bool PLAIN, class W> DEVICE Found fill_near(W& walk, Shared& s, const Depths& depths, Near near) {
  constexpr int ROW = sizeof(s.kept.z[0]);
  u64 sum = 0, fours = 0;
  u32 start = shared_address(&s.kept.z[0][threadIdx.x]), at = start;
  bool crowded = !KEEPS;
  walk.run([&](Four f, int id) {
    float depth[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += biased_mass(depth[j] = depths.of<PLAIN>(f.x[j]));
    ++fours;
    if (!near.has(fminf(fminf(depth[0], depth[1]), fminf(depth[2], depth[3])))) return;
    if (!KEEPS) {
#pragma unroll
      for (int j = 0; j < 4; ++j) add_near(s.bins, near, depth[j]);
    } else if (at + 4 * ROW <= start + KEPT * ROW) {
#pragma unroll
      for (int j = 0; j < 4; ++j) store_if_less<KEPT * ROW, ROW>(depth[j], near.depth, at, f.x[j], id + j);
    } else {
      crowded = true;
      add_four_near(s.bins, near, depth[0], depth[1], depth[2], depth[3]);
    }
  });
  int kept = (at - start) / ROW;
#pragma unroll 1
  for (int i = 0; i < kept; ++i) {
    float depth = depths.of<PLAIN>(s.kept.z[i][threadIdx.x]);
    s.bins[bin_of(depth)].add(mass_of(depth));
  }
  return {sum - 4 * fours * BIAS, kept, crowded};
}

template <class L> RARELY Found fill_near_slowly(L z, Shared& s, Team team, Depths depths, Near near) {
  Walk<L> walk(z, team);
  return fill_near<false>(walk, s, depths, near);
}

// Adds the block's share of the other entries to its bins.
template <class L> RARELY void fill_far(L z, Shared& s, Team team, Depths depths, Near near) {
  Walk<L, AHEAD>(z, team).run([&](Four f, int) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float depth = depths.of(f.x[j]);
      if (!near.has(depth) && depth < DEEPEST) s.bins[bin_of(depth)].add(mass_of(depth));
    }
  });
}

// By the first block, behind the team's barrier: its bins are then those of the whole row.
DEVICE void gather_bins(Shared& s, const Team& team, int begin, int end) {
  for (int b = begin + (int)threadIdx.x; b < end; b += THREADS) {
    u64 mass = 0;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r)
      if (r < team.size) mass += at_rank(s.bins, r)[b].value();
    s.bins[b] = {(u32)mass, (u32)(mass >> 32)};
  }
  __syncthreads();
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
      sum += mass[e] = b < BINS ? s.bins[b].value() : 0;
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

