// Conversion of rows between data types, with the functions that all kernels use.
#include "rows.h"

#include "tilerec.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

template <class From, class To>
void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  store(to + i, load(from + i, (int)(count - i)), (int)(count - i));
}

template <class From>
void convert_from(const From* from, void* to, int32_t to_type, int64_t count) {
  if (to_type == TR_F32) convert(from, (float*)to, count);
  if (to_type == TR_BF16) convert(from, (bf16*)to, count);
  if (to_type == TR_F16) convert(from, (fp16*)to, count);
}

}  // namespace

void convert_numbers(const void* from, int32_t from_type, void* to, int32_t to_type, int64_t count) {
  if (from_type == TR_F32) convert_from((const float*)from, to, to_type, count);
  if (from_type == TR_BF16) convert_from((const bf16*)from, to, to_type, count);
  if (from_type == TR_F16) convert_from((const fp16*)from, to, to_type, count);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
