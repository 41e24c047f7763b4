// One launch samples every row of a step: a cluster of CLUSTER blocks a row, whatever the row's settings.
//
//   entries[blockIdx.y]  where the row's logits lie and which slot it is (-1: no row)
//   tables               every slot's numbers and history (edit.cuh, packed.ROW)
//   results              (token, status) a row; may be pinned host memory
//   next_ids             the token again as int64, 0 where there is none: the model's next input; may be null
//
// Order: edits in place -> one read of the row (maxima of 1,024 groups) -> the first block finishes greedy, top_k and
// min_p rows from a few candidates while the others leave -> the rest stay together for the masses -> the tail.
#include "edit.cuh"
#include "wide.cuh"

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
DEVICE void finish(const Tables& t, int slot, Shared& s, bool picked, int ender, int2* result, long long* next_id) {
  const Row& row = s.row;
  int token = picked ? s.token : -1, status = s.token;
  bool is_eos = __syncthreads_or((int)threadIdx.x < row.num_eos && ender == token);
  bool is_stop = __syncthreads_or((int)threadIdx.x < row.num_eos + row.num_stop && ender == token);
  if (threadIdx.x) return;
  Row& stored = t.rows[slot];
  if (picked) {
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

// Whether a few candidates settled the row. The whole team learns the answer.
template <class L> DEVICE bool try_candidates(const L& z, Shared& s, const Team& team, u32 top_key, u64 uniform) {
  if (team.rank == 0) {
    draw_from_candidates(z, s, top_key, uniform);
    if (threadIdx.x < team.size) *at_rank(&s.settled, threadIdx.x) = s.token >= 0;
  }
  team.sync();
  return s.settled;
}

// From this thread's maximum of edited logits to the row's token in the first block's s.token, and true; or false,
// and why not.
template <class L> DEVICE bool pick(const L& z, float m, Shared& s, u32 rank) {
  const Row& row = s.row;
  bool first_alone = row.kind == GREEDY || (row.kind == BY_RANK && row.top_k > 0 && row.top_k <= MAX_CANDIDATE_K);
  share_maxima(m, s, rank, !first_alone);
  if (rank && first_alone) return false;
  if (threadIdx.x == THREADS - 1) s.uniform = uniforms(row.seed, row.length - row.num_prompt, row.sample);
  await(&s.mailbox);
  u32 top_key = row_top_key(s);
  bool saw_nan = top_key == ~0u || s.flags & SAW_NAN;
  if (saw_nan || top_key <= MINUS_INFINITY_KEY) {
    if (threadIdx.x == 0) s.token = saw_nan || !(s.flags & HID_SOMETHING) ? INVALID_LOGITS : NO_ALLOWED_TOKEN;
    return false;
  }
  __syncthreads();
  Team team = {rank, first_alone ? 1u : (u32)CLUSTER};
  Depths depths(of_key(top_key), row.scale, row.reach);
  u64 uniform = s.uniform.first;
  bool few = first_alone || (row.top_k == 0 && row.reach < INFINITE);
  if (row.kind == GREEDY) {
    greedy(z, s, top_key);
  } else if (row.kind == BY_ID) {
    draw_by_id(z, s, team, depths);
  } else if (!few || !try_candidates(z, s, team, top_key, uniform)) {
    if (row.top_k == 0) draw_together(z, s, team, depths, uniform);
    else if (rank == 0) draw_alone(z, s, depths, uniform);
  }
  return true;
}

// Where a row's edits happen: in place, or on an fp32 copy. Rounding the edits of an fp16 or bf16 row back would change
// what they mean, and some rows' own logits are wanted afterwards.
template <class Type> DEVICE float* editable(const Logits<Type>& z, bool keep, float* copy, u32 rank) {
  if constexpr (sizeof(typename Type::Stored) == sizeof(float))
    if (!keep) return const_cast<float*>(z.row);
  for (int id = rank * THREADS + threadIdx.x; id < z.size; id += CLUSTER * THREADS) copy[id] = z.at(id);
  cluster_sync();
  return copy;
}

// The row's numbers into shared memory, from the registers they were loaded into; whether the row still runs.
DEVICE bool take_numbers(Shared& s, u32 number) {
  if (threadIdx.x < sizeof(Row) / 4) ((u32*)&s.row)[threadIdx.x] = number;
  __syncthreads();
  if (threadIdx.x == 0) s.token = s.row.status;
  return s.row.status == RUNNING;
}

// The row's numbers arrive while its logits are read.
template <class L> DEVICE bool scan_and_pick(const L& z, Shared& s, u32 number, u32 rank) {
  float m = scan_share(z, rank);
  return take_numbers(s, number) && pick(z, m, s, rank);
}

template <class Type>
DEVICE bool sample_row(const Logits<Type>& z, const Entry& entry, const Tables& t, float* copies, Shared& s, u32 number) {
  u32 rank = cluster_rank();
  float* edited = nullptr;
  if (threadIdx.x == 0) {
    s.flags = 0;
    open_mailbox(&s.mailbox, mail_of(rank));
  }
  if (entry.edits) {
    mailboxes_arrive_with_writes();  // the edits add to everyone's flags
    if (!take_numbers(s, number)) return false;
    mailboxes_wait();
    edited = editable(z, entry.keep, copies + (u64)entry.slot * z.size, rank);
    edit(edited, t, entry.slot, s, rank);
  }
  mailboxes_arrive();
  if constexpr (sizeof(typename Type::Stored) == sizeof(float))
    return scan_and_pick(Logits<Type>(edited ? edited : z.row, z.size), s, number, rank);
  else
    return edited ? scan_and_pick(Logits<Float32>(edited, z.size), s, number, rank) : scan_and_pick(z, s, number, rank);
}

extern "C" __global__ void CLUSTER_DIMENSIONS __launch_bounds__(THREADS, BLOCKS)
sample_rows(const Entry* entries, float* copies, int2* results, long long* next_ids, TABLE_PARAMETERS) {
  SHARED(Shared, s);
  Tables t = TABLES;
  Entry entry = entries[blockIdx.y];
  if (entry.slot < 0) return;
  u32 number = threadIdx.x < sizeof(Row) / 4 ? ((const u32*)&rows[entry.slot])[threadIdx.x] : 0;
  int ender = threadIdx.x < MAX_ENDERS ? enders[(u64)entry.slot * MAX_ENDERS + threadIdx.x] : -1;
  Logits<LOGITS> z((const LOGITS::Stored*)entry.address, vocab_size);
  bool picked = sample_row(z, entry, t, copies, s, number);
  if (cluster_rank() == 0) {
    __syncthreads();
    finish(t, entry.slot, s, picked, ender, results + blockIdx.y, next_ids ? next_ids + blockIdx.y : nullptr);
  }
}
