// Scan of rows for the best inner products with queries (tilerec/ops/search/definition.py is the specification).
//
// A block of rows is transposed once and read by all queries of a group, so that a vector holds one column of as many rows.
#pragma once

#include <stdint.h>

#include "isa.h"

namespace tilerec {

constexpr int64_t kSearchBlock = 64;    // rows of a block
constexpr int64_t kSearchPadding = 64;  // a query's bytes are padded with zeros to a multiple of this

struct Candidate {
  float score;
  int64_t place;
};

// Candidates of one query. The owner keeps room for a block's rows.
struct Candidates {
  Candidate* at;
  int64_t count;
  float threshold;  // a candidate's score is above it
  int64_t required, forbidden;
};

struct SearchBlock {
  const void* rows;      // of the table
  const float* scale;    // of each row of int8
  const int64_t* words;  // of each row
  int64_t dim, first, count;
  bool int8;
  const char* queries;  // float or int8, padded
  int64_t query_bytes;
  const float* query_scale;
  const int32_t* query_sum;  // of the numbers of each query of int8
  int64_t query_count;
  Candidates* found;
  void* scratch;  // aligned to 64 bytes: see search_scratch
};

// Bytes of the scratch of a thread: a block of rows, 32 bits per number at most.
inline int64_t search_scratch(int64_t dim) { return (dim + kSearchPadding) * kSearchBlock * 4; }

// A call of tr_best_rows: addresses of contiguous arrays, then sizes.
struct SearchCall {
  // The result's are scores (float) and places (int64), [batch, k]. query_scale and query_sum are read for int8 only.
  int64_t queries, rows, scale, words, query_scale, query_sum, first, last, required, forbidden, scores, places;
  int64_t batch, dim, count, ranges, k, int8, query_bytes;
};

}  // namespace tilerec

// Returns TR_OK or TR_NO_MEMORY. `call` is a SearchCall.
extern "C" __attribute__((visibility("default"))) int32_t tr_best_rows(const void* call, int64_t threads);

TILEREC_DECLARE(void search_block(const SearchBlock&))
