// Lookups of rows: the C functions and the inputs of their kernels (tilerec/ops/lookup/definition.py is the specification).
//
//   out[f, b] = s * sum_p w_p * W[ids_p],   s = 1 (sum) or 1 / L (mean),  p over the L ids of bag (f, b); empty bag: zeros
//
// Sums run in fp32 in the order of the occurrences: a multiplication by w_p (if there are weights) and an addition per row, a
// division by L at the end of a mean, one rounding to the type of the output.
#pragma once

#include "tilerec.h"

// Rows may be quantized: a number is then scale * code + bias, two roundings, before anything else.
//
// One call. Arrays of features: tables, keys, means. Arrays of tables: rows, dims, types, data.
typedef struct {
  int64_t features;
  const int64_t *tables, *keys, *means;
  int64_t table_count;
  const int64_t *rows, *dims, *types;
  const void* const* data;
  int64_t batch_count;     // 1: every key has batches[0] bags; otherwise one entry per key
  const int64_t* batches;
  const void* ids;
  int64_t index_type, id_count;
  const int64_t* offsets;  // pooled: first id per bag; sequence: first id per feature
  int64_t offset_count;
  const float* sample_weights;  // or null
  void* numbers;                // the output; of tr_sample_weight_grad: the output's gradient
  int64_t number_type;
  float* sample_grads;          // tr_sample_weight_grad alone: [id_count], zeros
  int64_t threads;
  tr_report report;
} tr_lookup;

// `value` of a call that is a TR_BAD_ARGUMENT; `feature` is the first with this error.
enum {
  TR_LOOKUP_FEW_OFFSETS = 1,  // fewer bags than the batch sizes require, or a negative batch size
  TR_LOOKUP_BAD_TABLE = 2,    // a table outside [0, table_count)
  TR_LOOKUP_BAD_KEY = 3,      // a key outside [0, batch_count)
  TR_LOOKUP_NO_ROWS = 4,      // a table whose rows have no memory
  TR_LOOKUP_BAD_DIM = 5,      // sequence: a table whose dim is not the first feature's
  TR_LOOKUP_BAD_TYPE = 6      // a type that the function does not read
};

// Each returns report.status.
//
// Example: one table {{1, 2}, {3, 4}}, ids {0, 1, 1}, offsets {0, 2, 3}, sum: out {{4, 6}, {3, 4}}.
TR_API int64_t tr_pooled_lookup(tr_lookup* call);
// Row by row: out[p] = W[ids[p]]; keys, means, batches and sample_weights are not read. The features' runs begin at 0, are
// contiguous and end at id_count, so that every row of the output is written. Same example: {{1, 2}, {3, 4}, {3, 4}}.
TR_API int64_t tr_sequence_lookup(tr_lookup* call);
// sample_grads[p] += s * <numbers[f, b], W[ids_p]>, features in their order. In a product's sum, eight running sums over
// the columns c % 8 are added up as ((0+1)+(2+3))+((4+5)+(6+7)).
TR_API int64_t tr_sample_weight_grad(tr_lookup* call);

#if defined(__cplusplus)
namespace tilerec {

// A feature of one call, with all positions resolved: bag b holds the ids offsets[b] .. offsets[b + 1], and its result is
// at element numbers_start + b * numbers_stride of the output.
struct LookupFeature {
  const void* data;
  uint64_t rows;
  int64_t dim, row_bytes;
  int32_t type;
  bool mean;
  int64_t bags;
  const int64_t* offsets;
  int64_t numbers_start, numbers_stride;
};

// A run of one feature's bags (sequence: of one feature's ids) for one thread. `scratch`: as many floats as the widest table.
struct LookupPart {
  const tr_lookup* call;
  const LookupFeature* feature;
  int64_t begin, end;
  float* scratch;
  bool stream;  // sequence: write around the caches (non-temporal stores)
};

// The first error of a part, in its order; status TR_OK if there is none. Value and position as in tr_report, with a bag's
// number counted from the feature's first bag.
struct LookupFault {
  int64_t status, position, value;
};

}  // namespace tilerec
#endif
