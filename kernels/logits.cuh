// One row of logits as 16-byte (fp32) or 8-byte (fp16, bf16) vectors of 4, whatever the row's alignment.
#pragma once
#include "device.cuh"


#define NOTHING Four{{-INFINITE, -INFINITE, -INFINITE, -INFINITE}}

struct Float32 {
  typedef float Stored;
  static DEVICE float one(const float* p) { return *p; }
  static DEVICE Four four(const float* p) { return load_global(p); }
};

struct Float16 {
  typedef unsigned short Stored;
  static DEVICE float one(const Stored* p) { return half_to_float(*p); }
  static DEVICE Four four(const Stored* p) {
    ushort4 h = *(const ushort4*)p;
    return {{half_to_float(h.x), half_to_float(h.y), half_to_float(h.z), half_to_float(h.w)}};
  }
};

struct BFloat16 {
  typedef unsigned short Stored;
  static DEVICE float one(const Stored* p) { return __uint_as_float((u32)*p << 16); }
  static DEVICE Four four(const Stored* p) {
    ushort4 h = *(const ushort4*)p;
    return {{__uint_as_float((u32)h.x << 16), __uint_as_float((u32)h.y << 16), __uint_as_float((u32)h.z << 16),
             __uint_as_float((u32)h.w << 16)}};
  }
};

// Ids first ... first + 3, read one by one; -inf where the row has none.
template <class Type> RARELY Four load_one_by_one(const typename Type::Stored* row, int size, int first) {
  Four out;
  for (int j = 0; j < 4; ++j) out.x[j] = first + j >= 0 && first + j < size ? Type::one(row + first + j) : -INFINITE;
  return out;
}

//            row
//             v
//   | . s s s | 0 1 2 3 | ...           aligned vectors; vector v holds ids 4 v - shift ... 4 v - shift + 3
//     shift     the first and the last vector may be partial and are read entry by entry
template <class Type> struct Logits {
  typedef typename Type::Stored Stored;
  const Stored* row;
  int size, shift, vectors, full_begin, full_end;

  DEVICE Logits(const Stored* row, int size) : row(row), size(size) {
    shift = (int)((u64)row / sizeof(Stored) & 3);
    vectors = (size + shift + 3) >> 2;
    full_begin = shift ? 1 : 0;
    full_end = (size + shift) >> 2;
  }
  DEVICE int id(int vector, int j) const { return 4 * vector - shift + j; }
  DEVICE float at(int id) const { return Type::one(row + id); }
  DEVICE bool full(int v) const { return v >= full_begin && v < full_end; }
  DEVICE Four load_full(int v) const { return Type::four(row + (4ll * v - shift)); }
  DEVICE Four load_partial(int v) const { return load_one_by_one<Type>(row, size, id(v, 0)); }
  DEVICE Four load(int v) const { return full(v) ? load_full(v) : load_partial(v); }
};
