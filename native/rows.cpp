#include "isa.h"

TILEREC_DECLARE(void convert_numbers(const void* from, int32_t from_type, void* to, int32_t to_type, int64_t count))

// Converts `count` numbers and rounds to nearest even. Example: fp32 1.00390625 (1 + 2^-8) to bf16: a tie, to even: 1.0.
TR_API void tr_convert(const void* from, int32_t from_type, void* to, int32_t to_type, int64_t count) {
  TILEREC_CALL(convert_numbers)(from, from_type, to, to_type, count);
}
