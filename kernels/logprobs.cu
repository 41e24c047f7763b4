// Log-probabilities of the model's raw distribution, for the rows of a step that want them: a second launch, behind
// sample_rows, on logits that it left as they were (Entry.keep).
//
//   drawn[row]             of the row's last token
//   top_ids, top[row][]    of the most likely Entry.top ids, best first; most_top to a row
//
// The sum over the vocabulary is the sampler's integer one at temperature 1: the same bits however it is split.
#include "edit.cuh"
#include "wide.cuh"

constexpr double LN2 = 0.6931471805599453;

// The best rank below `previous`, by the first block; 0 where there is none.
template <class L> DEVICE u64 best_below(const L& z, Shared& s, u64 previous) {
  u64 best = 0;
  for (int id = threadIdx.x; id < z.size; id += THREADS) {
    u64 rank = rank_of(z.at(id), id);
    if (rank < previous) best = max(best, rank);
  }
  return block_max(best, s);
}

// The `count` best ranks into s.ranks, by the first block. Almost always a few candidates hold them; ties by the
// thousand, and rows with fewer finite entries, are searched one by one.
template <class L> DEVICE void rank_best(const L& z, Shared& s, u32 top_key, int count) {
  find_bound(s, top_key, count);
  int n = collect_candidates(z, s);
  if (n <= CAPACITY && n >= count) return sort_best_first(s, n);
  u64 previous = ~0ull;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    previous = best_below(z, s, previous);
    if (threadIdx.x == 0) s.ranks[i] = previous;
    __syncthreads();
  }
}

// Every block's share of the row's mass, to the first.
template <class L> DEVICE void share_mass(const L& z, Shared& s, const Team& team, const Depths& depths) {
  u64 sum = 0;
  Walk<L, AHEAD>(z, team).run([&](Four f, int) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += mass_of(depths.of(f.x[j]));
  });
  u64 share = block_inclusive(sum, s, 1).total;
  if (threadIdx.x == 0) at_rank(&s, 0)->shares[team.rank] = share;
  team.sync();
}

extern "C" __global__ void CLUSTER_DIMENSIONS __launch_bounds__(THREADS, BLOCKS)
log_probabilities(const Entry* entries, float* drawn, int* top_ids, float* top, int most_top, TABLE_PARAMETERS) {
  SHARED(Shared, s);
  Entry entry = entries[blockIdx.y];
  if (entry.slot < 0 || entry.top < 0) return;
  const Row& row = rows[entry.slot];
  if (row.status == INVALID_LOGITS || row.length == row.num_prompt) return;
  Logits<LOGITS> z((const LOGITS::Stored*)entry.address, vocab_size);
  Team team = {cluster_rank(), CLUSTER};
  if (threadIdx.x == 0) open_mailbox(&s.mailbox, mail_of(team.rank));
  mailboxes_arrive();
  share_maxima(scan_share(z, team.rank), s, team.rank, true);
  await(&s.mailbox);
  u32 top_key = row_top_key(s);
  float best = of_key(top_key);
  share_mass(z, s, team, Depths(best, 1.442695041f, INFINITE));
  if (team.rank) return;
  u64 total = 0;
  for (u32 r = 0; r < CLUSTER; ++r) total += s.shares[r];
  double log_sum = log((double)total) - 42 * LN2;
  if (entry.top > 0) rank_best(z, s, top_key, entry.top);
  for (int i = threadIdx.x; i < entry.top; i += THREADS) {
    top_ids[(u64)blockIdx.y * most_top + i] = (int)id_of(s.ranks[i]);
    top[(u64)blockIdx.y * most_top + i] = (float)((double)of_key((u32)(s.ranks[i] >> 32)) - best - log_sum);
  }
  if (threadIdx.x == 0) {
    int token = tokens[(u64)entry.slot * max_length + row.length - 1];
    drawn[blockIdx.y] = (float)((double)canonical(z.at(token)) - best - log_sum);
  }
}
