// Draws that need the whole row's masses, by the row's whole cluster: no filter, or top_p without top_k.
#pragma once
#include "pick.cuh"
#include "rare.cuh"

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
  template <bool PLAIN, class L> DEVICE u64 mass(const L& z, const Depths& depths) {
    u64 sum = 0;
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      int id = z.id(first + 32 * u, 0);
      if (id >= end) break;
      if (!z.full(first + 32 * u)) f[u] = z.load_partial(first + 32 * u);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u64 m = mass_of(depths.of<PLAIN>(f[u].x[j]));
        sum += id + j >= begin && id + j < end ? m : 0;
      }
    }
    return sum;
  }
};

template <bool PLAIN, class L> DEVICE void sum_strips(const L& z, Shared& s, const Team& team, const Depths& depths, int strips) {
  int strip = team.rank * WARPS + warp(), stride = team.size * WARPS;
  Strip mine, next;
  mine.load(z, strip);
#pragma unroll 1
  for (; strip < strips; strip += stride) {
    next.load(z, strip + stride);
    u64 mass = warp_sum(mine.mass<PLAIN>(z, depths));
    if (lane() == 0) *at_rank(&s.strip_mass[strip], 0) = mass;
    mine = next;
  }
}

// A chunk by its mass, then an id within it. The token in the first block's s.token.
template <class L> DEVICE void draw_by_id(const L& z, Shared& s, const Team& team, const Depths& depths) {
  int strips = (z.size + (1 << STRIP_BITS) - 1) >> STRIP_BITS;
  if (depths.plain()) sum_strips<true>(z, s, team, depths, strips);
  else sum_strips<false>(z, s, team, depths, strips);
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
  constexpr int EACH = ((1 << CHUNK_BITS) + THREADS - 1) / THREADS;
  u64 masses[EACH], sum = 0;
  for (int j = 0; j < EACH; ++j) {
    int id = begin + EACH * threadIdx.x + j;
    sum += masses[j] = id < end ? mass_of(depths.of(z.at(id))) : 0;
  }
  u64 before = block_inclusive(sum, s, 1).inclusive - sum;
  for (int j = 0; j < EACH; before += masses[j++])
    if (before <= target && before + masses[j] > target) s.token = begin + EACH * threadIdx.x + j;
  __syncthreads();
}

// ------------------------------------------------------------------------------------------- in rank order

// By the first block: where the nucleus ends, as an inclusive prefix of masses; to the team, its bin and the bins, at
// most a few, that the draw can fall into (the bins say what the nucleus holds but for its last one's inside). Or
// s.deep: it ends beyond the bins filled so far.
DEVICE u64 find_bins(Shared& s, const Team& team, u64 uniform) {
  u64 total = 0;
  for (u32 r = 0; r < team.size; ++r) total += s.shares[r];
  MyBins bins(s);
  u64 end = s.row.top_p < TOP_P_OFF ? nucleus_end(total, s.row.top_p) : total - 1;
  bool deep = end >= bins.total;
  if (threadIdx.x < team.size) at_rank(&s, threadIdx.x)->deep = deep;
  if (deep) return end;
  bins.locate(end, &s.spots[0]);
  if (threadIdx.x == 0) s.found = s.num_last = s.num_draw = 0;
  __syncthreads();
  Spot last = s.spots[0];
  bins.locate(__umul64hi(uniform, last.before + 1), &s.spots[1]);
  bins.locate(__umul64hi(uniform, last.before + last.mass), &s.spots[2]);
  __syncthreads();
  if (threadIdx.x < team.size) at_rank(&s, threadIdx.x)->wanted = {last.bin, s.spots[1].bin, s.spots[2].bin};
  return end;
}

// The entries of the wanted bins, to the first block: of those kept, where these are all.
template <class L>
DEVICE void collect_wanted(const L& z, const Shared& s, Shared& first, const Team& team, const Depths& depths, int kept, bool all) {
  Wanted wanted = s.wanted;
  auto look = [&](float x, int id) {
    float depth = depths.of(x);
    if (wanted.has(bin_of(depth)) && depth < DEEPEST) push(first, rank_of(x, id));
  };
  if (__all_sync(ALL_LANES, all)) {
#pragma unroll 1
    for (int i = 0; i < kept; ++i) look(s.kept.z[i][threadIdx.x], s.kept.id[i][threadIdx.x]);
  } else {
    Walk<L, AHEAD>(z, team).run([&](Four f, int id) {
#pragma unroll
      for (int j = 0; j < 4; ++j) look(f.x[j], id + j);
    });
  }
}

// By the first block: cut the collected entries by top_p and draw. The token in s.token.
DEVICE void draw_collected(Shared& s, int n, const Depths& depths, u64 end, u64 uniform) {
  sort_best_first(s, n);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float depth = depths.of(of_key((u32)(s.ranks[i] >> 32)));
    int bin = bin_of(depth);
    s.mass[i] = mass_of(depth);
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

// top_p (and min_p) without top_k. One pass sums the masses and fills the near bins, or all where near entries are not
// kept (rarely one more the others); the entries that matter go to the first block, which sorts them. The token in the
// first block's s.token.
template <class L> DEVICE void draw_together(const L& z, Shared& s, const Team& team, const Depths& depths, u64 uniform) {
  Walk<L, AHEAD> walk(z, team);
  Near near(KEEPS ? bin_of(depths.of(of_key(row_bottom_key(s)))) + 1 : BINS);
  clear_bins(s);
  __syncthreads();
  Found found = depths.plain() ? fill_near<true>(walk, s, depths, near) : fill_near_slowly(z, s, team, depths, near);
  u64 share = block_inclusive(found.mass, s, 1).total, end = 0;
  if (threadIdx.x == 0) at_rank(&s, 0)->shares[team.rank] = share;
  team.sync();
  if (team.rank == 0) {
    gather_bins(s, team, 0, near.bins);
    end = find_bins(s, team, uniform);
  }
  team.sync();
  bool deep = s.deep;
  if (deep) {
    fill_far(z, s, team, depths, near);
    team.sync();
    if (team.rank == 0) {
      gather_bins(s, team, near.bins, BINS);
      end = find_bins(s, team, uniform);
    }
    team.sync();
  }
  collect_wanted(z, s, *at_rank(&s, 0), team, depths, found.kept, !found.crowded && !deep);
  team.sync();
  if (team.rank) return;
  if (s.found > CAPACITY) draw_alone(z, s, depths, uniform);
  else draw_collected(s, s.found, depths, end, uniform);
}
