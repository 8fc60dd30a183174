// Arguments that update.cpp passes to its kernels: plain records.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tilerec {

// Positions of the gradient rows of one table's sorted occurrences: occurrence i's is
//     grad[place[payload] or start + payload * stride : + dim], times scale[payload] if there is a scale.
struct Gather {
  const void* grad;
  const int64_t* place;
  const float* scale;
  int64_t start, stride, dim;
  const void* keys;  // sorted, `count` of `key_kind`
  size_t count;
  int32_t key_kind, payload_bits, grad_type;
};

enum { kKey32 = 0, kKey64 = 1, kKeyWide = 2 };

constexpr int kMaxSlots = 3;

// One table under one rule.
struct Target {
  void* weights;
  float* slots[kMaxSlots];
  const double* hyper;
  const int64_t* names;  // of the rows, or null: row r is r
  int64_t dim, full_dim;  // columns of this part, and of the whole row
  int64_t step, row_offset, column_offset;
  int64_t block_offset;  // position of the first column in the row, for the row sums' blocks
  uint32_t seeds[2];
  int32_t type, rule, hypers;

  int64_t name(int64_t row) const { return names ? names[row] : row; }
};

// The largest number of occurrences of a unit. A unit owns the runs (equal rows) that begin in it.
constexpr size_t kUnit = 512;

// Longer runs are summed in pieces of this many occurrences, pieces in order, so that threads can share a run. The bits
// depend on the run alone, never on the threads.
constexpr size_t kPiece = 4096;

struct UnitResult {
  int64_t skipped, first_row;  // rows whose gradient was not finite; the least of them
  size_t long_begin, long_end; // a run longer than kPiece, if long_begin < long_end; the caller must update it
};

// Floats of scratch a kernel needs for `dim` columns.
constexpr int64_t scratch_floats(int64_t dim) { return 12 * (dim + 128); }

}  // namespace tilerec
