// Rows packed for exchange: a scale and a byte per number (tilerec/ops/quantize/definition.py is the specification).
#pragma once

#include "tilerec.h"

typedef struct {
  const int64_t* lists;  // counts, widths (`segments` of each)
  int64_t segments;
  char* rows;    // float, or double if `wide` (unpacked ones only)
  char* packed;  // width + 4 bytes per row
  int64_t fp8;   // else int8
  int64_t wide, threads;
} tr_packing;
TR_API void tr_pack_rows(const tr_packing* call);
TR_API void tr_unpack_rows(const tr_packing* call);

#if defined(__cplusplus)
namespace tilerec {

// Rows of one width.
struct PackedRows {
  char *rows, *packed;
  int64_t count, width;
  bool fp8, wide;
};

}  // namespace tilerec
#endif
