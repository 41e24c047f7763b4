// Rows enter and leave their slots, a block each, behind everything already enqueued on the stream.
#include "edit.cuh"

//   blob   Row | tokens | enders | bias ids | bias | seen | times | mask words if masked
//   its lengths follow from the Row; the host packs it in the same order (cuda.py)
struct Blob {
  const int* next;
  DEVICE void take(int* to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = next[i];
    next += count;
  }
};

//   blobs      one behind the other, each a multiple of 8 bytes
//   entering   (slot, where its blob begins in i32), one a block
extern "C" __global__ void admit_rows(const int* blobs, const int2* entering, TABLE_PARAMETERS) {
  Tables t = TABLES;
  int slot = entering[blockIdx.x].x;
  const int* blob = blobs + entering[blockIdx.x].y;
  const Row& row = *(const Row*)blob;
  Blob rest = {blob + sizeof(Row) / 4};
  u64 history = (u64)slot * t.max_length;
  rest.take(t.tokens + history, row.length);
  rest.take(t.enders + (u64)slot * t.max_enders, row.num_eos + row.num_stop + row.num_held);
  rest.take(t.bias_ids + (u64)slot * t.max_biases, row.num_bias);
  rest.take((int*)t.bias + (u64)slot * t.max_biases, row.num_bias);
  const int* distinct = rest.next;
  rest.take(t.seen + history, row.num_seen);
  rest.take(t.times + history, row.num_seen);
  for (int i = threadIdx.x; i < row.num_seen; i += blockDim.x) t.places[(u64)slot * t.vocab_size + distinct[i]] = i + 1;
  int words = (t.vocab_size + 31) >> 5;
  if (row.masked) rest.take((int*)t.masks + (u64)slot * words, words);
  if (threadIdx.x < sizeof(Row) / 4) ((int*)&t.rows[slot])[threadIdx.x] = blob[threadIdx.x];
}

// Wipes the places through the list of what the row has seen: nothing of it reaches the slot's next row.
extern "C" __global__ void release_rows(const int* leaving, int ended, TABLE_PARAMETERS) {
  Tables t = TABLES;
  int slot = leaving[blockIdx.x];
  Row& row = t.rows[slot];
  int count = row.num_seen;
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    t.places[(u64)slot * t.vocab_size + t.seen[(u64)slot * t.max_length + i]] = 0;
  __syncthreads();
  if (threadIdx.x == 0) row.num_seen = 0, row.status = ended;
}
