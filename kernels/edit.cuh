// The edits of a row, in place and sparse: a penalised row costs its history, not its vocabulary.
#pragma once
#include "block.cuh"
#include "logits.cuh"

// Every row's numbers and history, by slot; sizes as in cpu_rows.State.
struct Tables {
  Row* rows;
  int *tokens, *seen, *times, *places, *enders, *bias_ids;
  float* bias;
  u32* masks;
  int vocab_size, max_length, max_enders, max_biases;
};

// A row of a step.
struct Entry {
  u64 address;  // of its logits
  int slot;     // -1: no row
  signed char edits;  // whether its logits may need any: else they are read before the row's numbers are there
  signed char keep;   // whether its logits must stay as they are: edits then happen on a copy
  short top;    // how many of its most likely ids' log-probabilities are wanted beside its token's; -1: none at all
};

#define TABLE_PARAMETERS                                                                                     \
  Row *rows, int *tokens, int *seen, int *times, int *places, int *enders, int *bias_ids, float *bias, u32 *masks, \
      int vocab_size, int max_length
#define TABLES \
  {rows, tokens, seen, times, places, enders, bias_ids, bias, masks, vocab_size, max_length, MAX_ENDERS, MAX_BIASES}

DEVICE bool edits_wanted(const Row& row) {
  bool held = row.length - row.num_prompt < row.min_tokens && row.num_eos + row.num_stop + row.num_held > 0;
  return held || row.masked || row.num_bias || row.penalised || row.ngram > 0;
}

// z[id] = value, remembering for the verdict what it covers: a NaN, or something finite.
DEVICE u32 store(float* z, int id, float old, float value) {
  z[id] = value;
  return old != old ? SAW_NAN : old > -INFINITE ? HID_SOMETHING : 0;
}

DEVICE u32 add_biases(float* z, const Tables& t, int slot, const Row& row, int first, int stride) {
  u32 flags = 0;
  for (int i = first; i < row.num_bias; i += stride) {
    int id = t.bias_ids[(u64)slot * t.max_biases + i];
    flags |= store(z, id, z[id], exact_add(z[id], t.bias[(u64)slot * t.max_biases + i]));
  }
  return flags;
}

// Each distinct seen id once: repetition, then frequency and presence of what the row has put out.
DEVICE u32 penalise(float* z, const Tables& t, int slot, const Row& row, int first, int stride) {
  u32 flags = 0;
  for (int i = first; i < row.num_seen; i += stride) {
    int id = t.seen[(u64)slot * t.max_length + i], times = t.times[(u64)slot * t.max_length + i];
    float old = z[id];
    bool positive = (int)__float_as_uint(old) > 0;
    float x = positive ? exact_div(old, row.repetition) : exact_mul(old, row.repetition);
    x = exact_sub(x, exact_mul(row.frequency, (float)times));
    flags |= store(z, id, old, times ? exact_sub(x, row.presence) : x);
  }
  return flags;
}

// One warp looks at 32 words, then clears each incomplete word's ids together.
DEVICE u32 apply_mask(float* z, const Tables& t, int slot, int first_warp, int warps) {
  u32 flags = 0;
  int words = (t.vocab_size + 31) >> 5;
  for (int start = 32 * first_warp; start < words; start += 32 * warps) {
    int word = start + (int)lane();
    u32 bits = word < words ? t.masks[(u64)slot * words + word] : ~0u;
    for (u32 todo = __ballot_sync(ALL_LANES, bits != ~0u); todo; todo &= todo - 1) {
      int source = __ffs(todo) - 1, id = 32 * (start + source) + (int)lane();
      u32 allowed = __shfl_sync(ALL_LANES, bits, source) >> lane() & 1;
      if (!allowed && id < t.vocab_size) flags |= store(z, id, z[id], -INFINITE);
    }
  }
  return flags;
}

DEVICE u32 hold_enders(float* z, const Tables& t, int slot, const Row& row, int first, int stride) {
  u32 flags = 0;
  for (int i = first; i < row.num_eos + row.num_stop + row.num_held; i += stride) {
    int id = t.enders[(u64)slot * t.max_enders + i];
    if (id < t.vocab_size) flags |= store(z, id, z[id], -INFINITE);
  }
  return flags;
}

// No id that would complete an n-gram already in prompt or output.
DEVICE u32 ban_repeated(float* z, const Tables& t, int slot, const Row& row, int first, int stride) {
  u32 flags = 0;
  const int *tokens = t.tokens + (u64)slot * t.max_length, *suffix = tokens + row.length - row.ngram + 1;
  for (int start = first; start <= row.length - row.ngram; start += stride) {
    int matches = 0;
    while (matches < row.ngram - 1 && tokens[start + matches] == suffix[matches]) ++matches;
    int id = tokens[start + row.ngram - 1];
    if (matches == row.ngram - 1 && id < t.vocab_size) flags |= store(z, id, z[id], -INFINITE);
  }
  return flags;
}

// All edits of one row by its cluster. Bans come last: they commute with the additions, -inf stays -inf. What the
// edits overwrote goes to every block's flags. Ends behind a cluster barrier.
RARELY void edit(float* z, const Tables& t, int slot, Shared& s, u32 rank) {
  const Row& row = s.row;
  int first = rank * THREADS + threadIdx.x, stride = CLUSTER * THREADS;
  u32 flags = 0;
  if (row.num_bias) {
    flags |= add_biases(z, t, slot, row, first, stride);
    cluster_sync();
  }
  if (row.penalised) {
    flags |= penalise(z, t, slot, row, first, stride);
    cluster_sync();
  }
  if (row.masked) flags |= apply_mask(z, t, slot, rank * WARPS + warp(), CLUSTER * WARPS);
  if (row.length - row.num_prompt < row.min_tokens) flags |= hold_enders(z, t, slot, row, first, stride);
  if (row.ngram > 0) flags |= ban_repeated(z, t, slot, row, first, stride);
  flags = __reduce_or_sync(ALL_LANES, flags);
  if (flags && lane() < CLUSTER) atomicOr(at_rank(&s.flags, lane()), flags);
  cluster_sync();
}
