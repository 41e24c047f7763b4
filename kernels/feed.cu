// The tokens of a decode step: from the host where it knows them, else the last one of the row's history.
//
//   given      i32[count]              below 0: the device knows
//   slots      i32[count]              -1: no row
//   rows       ROW[slots]              by slot, row_bytes each; at length_at: i32 tokens in the history
//   tokens     i32[slots, max_length]  the histories
//   input_ids  i64[count]              where the model reads
extern "C" __global__ void feed(const int* given, const int* slots, const char* rows, const int* tokens, long long row_bytes,
                                int length_at, long long max_length, long long* input_ids, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  int token = given[i], slot = slots[i];
  if (token < 0 && slot >= 0) token = tokens[slot * max_length + *(const int*)(rows + slot * row_bytes + length_at) - 1];
  input_ids[i] = token < 0 ? 0 : token;
}
