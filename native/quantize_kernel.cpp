// The loops of quantize.h, for one instruction set. They are plain loops over a row, which the compiler turns into vectors.
//
// Rounding to nearest, ties to even, is an addition: x + 1.5 * 2^23 has no bits left for a fraction of x.
#include <cstring>

#include "quantize.h"
#include "rows.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr float kSmallest = 1e-36f, kRound = 12582912.0f;
constexpr uint32_t kInfinity = 0x7F800000u;

TR_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

TR_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The largest magnitude; if there is a NaN, a NaN: its bits are the largest of all.
TR_INLINE float largest_of(const float* row, int64_t width) {
  uint32_t most = 0;
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t own = bits_of(row[i]) & 0x7FFFFFFFu;
    most = own > most ? own : most;
  }
  return float_of(most);
}

TR_INLINE uint8_t int8_code(float share) {
  return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(bits_of(share + kRound)) - static_cast<int32_t>(bits_of(kRound))));
}

// e4m3fn of |share| <= 448.
TR_INLINE uint8_t fp8_code(float share) {
  const uint32_t bits = bits_of(share), sign = (bits >> 24) & 0x80u, size = bits & 0x7FFFFFFFu;
  const uint32_t rounded = (size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20;  // to 3 bits of fraction, ties to even
  // Below 2^-6, numbers are multiples of 2^-9, the last bit of 2^14.
  const uint32_t small = bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = rounded - (120u << 3);
  return static_cast<uint8_t>(sign | (size < 0x3C800000u ? small : normal));
}

TR_INLINE float fp8_number(uint8_t code) {
  const uint32_t size = code & 0x7Fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0.001953125f;  // 2^-9
  const uint32_t normal = (size << 20) + (120u << 23);
  const uint32_t number = size < 8u ? bits_of(small) : size == 0x7Fu ? 0x7FC00000u : normal;
  return float_of(number | sign);
}

template <bool fp8>
void pack(const PackedRows& call) {
  const int64_t width = call.width;
  for (int64_t r = 0; r < call.count; ++r) {
    const float* row = reinterpret_cast<const float*>(call.rows) + r * width;
    char* to = call.packed + r * (width + 4);
    const float largest = largest_of(row, width), scale = largest < kSmallest ? 0.0f : largest / (fp8 ? 448.0f : 127.0f);
    memcpy(to, &scale, 4);
    uint8_t* __restrict codes = reinterpret_cast<uint8_t*>(to + 4);
    if (!(scale > 0.0f) || bits_of(scale) >= kInfinity) {
      for (int64_t i = 0; i < width; ++i) {  // zeros; in fp8 with the sign of a finite number
        const uint32_t bits = bits_of(row[i]);
        codes[i] = fp8 && (bits & 0x7FFFFFFFu) < kInfinity ? static_cast<uint8_t>((bits >> 24) & 0x80u) : uint8_t(0);
      }
      continue;
    }
    for (int64_t i = 0; i < width; ++i) codes[i] = fp8 ? fp8_code(row[i] / scale) : int8_code(row[i] / scale);
  }
}

template <bool fp8, class Number>
void unpack(const PackedRows& call) {
  const int64_t width = call.width;
  for (int64_t r = 0; r < call.count; ++r) {
    const char* from = call.packed + r * (width + 4);
    Number* __restrict row = reinterpret_cast<Number*>(call.rows) + r * width;
    float scale;
    memcpy(&scale, from, 4);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(from + 4);
    for (int64_t i = 0; i < width; ++i) {
      const float code = fp8 ? fp8_number(codes[i]) : static_cast<float>(static_cast<int8_t>(codes[i]));
      row[i] = static_cast<Number>(code * scale);
    }
  }
}

}  // namespace

void pack_rows(const PackedRows& call) { call.fp8 ? pack<true>(call) : pack<false>(call); }

void unpack_rows(const PackedRows& call) {
  if (call.wide)
    call.fp8 ? unpack<true, double>(call) : unpack<false, double>(call);
  else
    call.fp8 ? unpack<true, float>(call) : unpack<false, float>(call);
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
