// Random values of a tile, equal to those of the whole table at the same place (tilerec/ops/random/definition.py is the specification).
#pragma once

#include "tilerec.h"

enum { TR_UNIFORM = 0, TR_NORMAL = 1 };

// Fills out [rows, width] of `type`: uniform in [a, b), or normal with mean a and deviation b. Key: two Philox words.
// row_offset and column_offset are the tile's position in the table (>= 0).
//
// Example: key (0, 0), place (0, 0): the words of row 0 begin 0x6627e8d5, 0xe169c58d, so a uniform [1, 2] tile in [0, 1) is
// {0x6627e8 / 2^24, 0xe169c5 / 2^24} = {0.39904642, 0.88052022}.
TR_API void tr_random_fill(void* out, int64_t type, int64_t rows, int64_t width, uint32_t key0, uint32_t key1,
                           int64_t row_offset, int64_t column_offset, int64_t kind, float a, float b, int64_t threads);

// The same for any rows: row i of out is row places[i] of the table (>= 0).
TR_API void tr_random_rows(void* out, int64_t type, const int64_t* places, int64_t rows, int64_t width, uint32_t key0,
                           uint32_t key1, int64_t column_offset, int64_t kind, float a, float b, int64_t threads);

#if defined(__cplusplus)
namespace tilerec {

struct RandomFill {
  void* out;
  int64_t type, width;
  uint32_t key0, key1;
  int64_t row_offset, column_offset, kind;
  float a, b;
  const int64_t* places;  // numbers of the rows; null: row_offset, row_offset + 1, ...
};

}  // namespace tilerec
#endif
