// The sampler's arithmetic: canonical floats, ranks, integer masses, Philox. Equal bit for bit to kernels/reference.py.
#pragma once
#include "device.cuh"

constexpr u64 TOP_P_OFF = 1ull << 32;

enum Kind { GREEDY = 0, BY_ID = 1, BY_RANK = 2 };
enum Status { RUNNING = 0, EOS = 1, STOP = 2, LENGTH = 3, INVALID_LOGITS = 4, NO_ALLOWED_TOKEN = 5 };

// packed.ROW, field by field.
struct Row {
  u64 seed, top_p;
  float scale, reach, repetition, frequency, presence;
  int kind, top_k;
  u32 sample;
  int min_tokens, max_tokens, ngram, penalised, masked;
  int num_eos, num_stop, num_held, num_bias, num_prompt, length, num_seen, status, reserved;
};

DEVICE float canonical(float z) { return fabsf(z) < SMALLEST_NORMAL ? 0.0f : fminf(z, LARGEST); }

DEVICE u32 key_of(float canonical_z) {
  u32 bits = __float_as_uint(canonical_z);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float of_key(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// Larger ranks come first: the higher value, then the lower id.
DEVICE u64 rank_of(float z, u32 id) { return (u64)key_of(canonical(z)) << 32 | (u32)~id; }
DEVICE u32 id_of(u64 rank) { return ~(u32)rank; }

// Octaves below the maximum over 64: a depth. 1 (no mass) there and beyond, and beyond what min_p keeps.
struct Depths {
  float top, scale, reach, scale64;

  DEVICE Depths(float top, float scale, float reach)
      : top(top), scale(scale), reach(reach), scale64(exact_mul(scale, 1.0f / 64)) {}
  // Nothing infinite, nothing cut by min_p: two instructions do.
  DEVICE bool plain() const { return top < LARGEST && !(reach < INFINITE); }

  template <bool PLAIN> DEVICE float of(float z) const {
    if (PLAIN) return exact_mul_up_to_1(exact_sub(top, z), scale64);
    float y = exact_mul(exact_sub(top, canonical(z)), scale);
    // Non-negative floats compare as integers, so that no denormal is flushed.
    return (int)__float_as_uint(y) <= (int)__float_as_uint(reach) ? exact_mul_up_to_1(y, 1.0f / 64) : 1.0f;
  }
  DEVICE float of(float z) const { return of<false>(z); }
};

// Adding it rounds to an integer, which is then found in the sum's low bits.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

constexpr float DEEPEST = 43.0f / 64;  // from here on there is no mass

// 2^42 * 2^-octaves: reference.masses, as the low bits of a double. The last bit of 1536.0 is worth 2^-42, the unit of
// mass; BIAS is 1536.0's own bits.
constexpr u64 BIAS = 0x4098000000000000ull;
DEVICE u64 biased_mass(float depth) {
  float rounded = __fmaf_rn(depth, 64.0f, ROUNDER), part = __fmaf_rn(depth, 64.0f, ROUNDER - rounded);
  float a = __fmaf_rn(part, -0.00132647f, 0.00967151f);
  a = __fmaf_rn(part, a, -0.05550734f);
  a = __fmaf_rn(part, a, 0.24022242f);
  a = __fmaf_rn(part, a, -0.69314698f);
  a = __fmaf_rn(part, a, 1.0f);
  float scaled = __uint_as_float(__float_as_uint(a) - (__float_as_uint(rounded) << 23));  // a * 2^-rounded
  return (u64)__double_as_longlong(exact_double(scaled) + 1536.0);
}
DEVICE u64 mass_of(float depth) { return biased_mass(depth) - BIAS; }

struct Uniforms { u64 first, second; };

// Philox4x32-10 with counter (index, 0, 0, sample).
DEVICE Uniforms uniforms(u64 seed, u32 index, u32 sample) {
  u32 c0 = index, c1 = 0, c2 = 0, c3 = sample, k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    u32 h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {(u64)c1 << 32 | c0, (u64)c3 << 32 | c2};
}

// The last entry of the nucleus is the first one whose inclusive prefix exceeds this.
DEVICE u64 nucleus_end(u64 kept, u64 top_p) {
  u64 limit = __umul64hi(kept, top_p << 32);
  return limit ? limit - 1 : 0;
}
