// One launch samples every row of a step: a cluster of CLUSTER blocks a row, whatever the row's settings.
//
//   entries[blockIdx.y]  where the row's logits lie and which slot it is
//   tables               every slot's numbers and history (edit.cuh, packed.ROW)
//   results              (token, status) a row; may be pinned host memory
//   next_ids             the token again as int64, 0 where there is none: the model's next input; may be null
//
// Order: edits in place -> one read of the row (maxima of 1,024 groups) -> the first block finishes greedy, top_k and
// min_p rows from a few candidates while the others leave -> the rest stay together for the masses -> the tail.
#include "edit.cuh"
#include "wide.cuh"

struct Entry {
  u64 address;
  int slot, reserved;
};

// Enters one output token into a penalised row's history.
DEVICE void see(const Tables& t, int slot, Row& row, int token) {
  u64 history = (u64)slot * t.max_length;
  int& place = t.places[(u64)slot * t.vocab_size + token];
  if (place == 0) {
    place = ++row.num_seen;
    t.seen[history + place - 1] = token;
    t.times[history + place - 1] = 0;
  }
  ++t.times[history + place - 1];
}

// The tail: append the token, see whether it ends the row, report. By the first block; every thread holds one of the
// row's enders.
DEVICE void finish(const Tables& t, int slot, Shared& s, int token, int ender, int2* result, long long* next_id) {
  const Row& row = s.row;
  bool is_eos = __syncthreads_or((int)threadIdx.x < row.num_eos && ender == token);
  bool is_stop = __syncthreads_or((int)threadIdx.x < row.num_eos + row.num_stop && ender == token);
  if (threadIdx.x) return;
  Row& stored = t.rows[slot];
  int status = s.token;
  if (token >= 0) {
    t.tokens[(u64)slot * t.max_length + row.length] = token;
    stored.length = row.length + 1;
    if (row.penalised) see(t, slot, stored, token);
    bool full = row.length + 1 - row.num_prompt >= row.max_tokens;
    status = is_eos ? EOS : is_stop ? STOP : full ? LENGTH : RUNNING;
  }
  stored.status = status;
  *result = make_int2(token, status);
  if (next_id) *next_id = token < 0 ? 0 : token;
}

// Whether a few candidates settled the row. The whole cluster learns the answer.
template <class L> DEVICE bool try_candidates(const L& z, Shared& s, const Team& team, u32 top_key, u64 uniform) {
  if (team.rank == 0) {
    int token = draw_from_candidates(z, s, top_key, uniform);
    __syncthreads();
    if (threadIdx.x == 0) s.token = token;
    if (threadIdx.x < team.size) *at_rank(&s.settled, threadIdx.x) = token >= 0;
  }
  team.sync();
  return s.settled;
}

// Edits done: the token in the first block, anything in the others. -1: s.token says why.
template <class L> DEVICE int pick(const L& z, Shared& s, u32 rank) {
  const Row& row = s.row;
  scan(z, s, rank);
  bool first_alone = row.kind == GREEDY || (row.kind == BY_RANK && row.top_k > 0 && row.top_k <= MAX_CANDIDATE_K);
  if (rank && first_alone) return -1;  // it has arrived: a block that leaves holds up none
  cluster_wait();
  u32 top_key = row_top_key(s);
  bool saw_nan = top_key == ~0u || s.flags & SAW_NAN;
  if (saw_nan || top_key <= MINUS_INFINITY_KEY) {
    if (threadIdx.x == 0) s.token = saw_nan || !(s.flags & HID_SOMETHING) ? INVALID_LOGITS : NO_ALLOWED_TOKEN;
    __syncthreads();
    return -1;
  }
  if (row.kind == GREEDY) return greedy(z, s, top_key);
  float top = of_key(top_key);
  Uniforms uniform = uniforms(row.seed, row.length - row.num_prompt, row.sample);
  Team team = {rank, first_alone ? 1u : (u32)CLUSTER};
  if (row.kind == BY_ID) return draw_by_id(z, s, team, top, uniform);
  bool few = first_alone || (row.top_k == 0 && row.reach < INFINITE);
  if (few && try_candidates(z, s, team, top_key, uniform.first)) return s.token;
  fill_bins(z, s, team, top);
  if (row.top_k == 0) return draw_together(z, s, team, top, uniform.first);
  return rank ? -1 : draw_alone(z, s, top, uniform.first);
}

// Edits of fp16 and bf16 rows happen on an fp32 copy: rounding them back would change what the row means.
template <class Type> DEVICE float* editable(const Logits<Type>& z, float* copy, u32 rank) {
  if constexpr (sizeof(typename Type::Stored) == sizeof(float)) {
    return const_cast<float*>(z.row);
  } else {
    for (int id = rank * THREADS + threadIdx.x; id < z.size; id += CLUSTER * THREADS) copy[id] = z.at(id);
    cluster_arrive(), cluster_wait();
    return copy;
  }
}

template <class Type> DEVICE int edit_and_pick(const Logits<Type>& z, const Tables& t, int slot, float* copies, Shared& s) {
  u32 rank = cluster_rank();
  cluster_arrive();
  if (!edits_wanted(s.row)) {
    if constexpr (sizeof(typename Type::Stored) < sizeof(float)) return pick(z, s, rank);
  }
  float* row = const_cast<float*>((const float*)z.row);
  if (edits_wanted(s.row)) {
    cluster_wait();
    row = editable(z, copies + (u64)slot * z.size, rank);
    edit(row, t, slot, s, rank);
    cluster_arrive();
  }
  return pick(Logits<Float32>(row, z.size), s, rank);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
sample_rows(const Entry* entries, Row* rows, int* tokens, int* seen, int* times, int* places, int* enders, int* bias_ids,
            float* bias, u32* masks, float* copies, int2* results, long long* next_ids, int vocab_size, int max_length) {
  SHARED(Shared, s);
  Tables t = {rows, tokens, seen, times, places, enders, bias_ids, bias, masks, vocab_size, max_length, MAX_ENDERS, MAX_BIASES};
  Entry entry = entries[blockIdx.y];
  if (threadIdx.x < sizeof(Row) / 4) ((u32*)&s.row)[threadIdx.x] = ((const u32*)&rows[entry.slot])[threadIdx.x];
  int ender = threadIdx.x < MAX_ENDERS ? enders[(u64)entry.slot * MAX_ENDERS + threadIdx.x] : -1;
  if (threadIdx.x < CLUSTER) s.tops[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.flags = 0;
  __syncthreads();
  int token = -1;
  if (s.row.status != RUNNING) {
    if (threadIdx.x == 0) s.token = s.row.status;
    __syncthreads();
  } else {
    token = edit_and_pick(Logits<LOGITS>((const LOGITS::Stored*)entry.address, vocab_size), t, entry.slot, copies, s);
  }
  if (cluster_rank() == 0)
    finish(t, entry.slot, s, token, ender, results + blockIdx.y, next_ids ? next_ids + blockIdx.y : nullptr);
}

extern "C" __device__ const int shared_bytes = sizeof(Shared);
