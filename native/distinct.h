// Repeated ids of a batch: the distinct ids of each key, rows copied to all their items, and gradients summed over them
// (tilerec/ops/distinct/definition.py is the specification, with the terms).
#pragma once

#include "tilerec.h"

typedef struct {
  const void* ids;
  int64_t index_type;
  const int64_t* offsets;
  int64_t keys;
  const int64_t* lists;  // batches, rows, percent (`keys` of each)
  int64_t each_id;
  // Results, with room for as many distinct ids as ids. The last two are cut to the sums of `counts`.
  void* out;
  int64_t *out_offsets, *counts;
  int32_t *items, *starts;
  // Scratch.
  int32_t* inverse;  // one per item
  uint64_t* table;   // `room` of each thread
  int64_t room, threads;
  int64_t item_count;  // result: length of `items`
} tr_distinct;
TR_API void tr_distinct_ids(tr_distinct* call);

typedef struct {
  const int64_t* lists;  // counts, widths, slot_starts, places, strides, adds, firsts, features (`segments` of each)
  int64_t segments;
  char* flat;
  int64_t flat_size;  // elements
  char* rows;
  int64_t rows_size;
  const int32_t* slots;
  int64_t slot_count;
  const int32_t *items, *starts;
  int64_t item_count, start_count;
  int64_t element_bytes;  // 4 or 8: float or double
  int64_t fresh, threads;
} tr_repeats;
// Each returns 0, or 1 + the number of a segment that leaves its tensors; then nothing has been written.
TR_API int64_t tr_expand_rows(tr_repeats* call);
TR_API int64_t tr_sum_rows(tr_repeats* call);

#if defined(__cplusplus)
namespace tilerec {

// One segment, for the columns and the rows of one thread.
struct RepeatedRows {
  char* rows;            // of the first of `count` rows
  int64_t row_bytes;
  char* flat;            // of item 0
  int64_t stride_bytes;  // from item to item
  int64_t width_bytes;   // copied or added
  int64_t begin, end;    // rows of the segment
  const int32_t* slots;  // of the segment's rows; null: 0, 1, 2 ...
  const int32_t *items, *starts;  // null: items are slots
  int64_t element_bytes;
  bool adds;
  bool past_caches;  // write whole cache lines around the caches
};

}  // namespace tilerec
#endif
