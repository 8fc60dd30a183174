// The loops of lookup.h.
//
// A row is cut into blocks of 8, 4, 2 or 1 vectors and a last part of a vector. The sum of a block stays in registers while
// the loop reads the rows of a bag. Rows of later bags are prefetched: a table is far larger than any cache, and the
// processor cannot predict the next row. A wide row takes several passes, each over the same few bags, so that a pass finds
// the page of a row in the TLB.
#include "lookup.h"

#include "row_reader.h"

namespace tilerec {
namespace TILEREC_ISA {
namespace {

constexpr int64_t kAheadBytes = 8192;  // rows prefetched ahead, in bytes of the block
constexpr int64_t kGroupRows = 64;     // rows of the bags that the passes over a wide row share

inline int64_t ahead(int64_t bytes) {
  int64_t rows = kAheadBytes / (bytes > 0 ? bytes : 1);
  return rows < 8 ? 8 : rows > 32 ? 32 : rows;
}

template <int kBytes>
TR_INLINE void ask_for(const char* at) {
  // Rows begin at multiples of 4 bytes, so 4 bytes beyond a whole number of lines need no more than the line at the end.
  for (int i = 0; i == 0 || i < kBytes - 4; i += 64) __builtin_prefetch(at + i, 0, 3);
  // A block that is no multiple of a cache line may end in one more line.
  if (kBytes % 64) __builtin_prefetch(at + kBytes - 1, 0, 3);
}

// Destination of the numbers of one feature's bags.
struct Out {
  void* at;
  int64_t type, stride;
};

TR_INLINE void put(const Out& out, int64_t number, vf x) {
  if (out.type == TR_F32)
    store((float*)out.at + number, x);
  else if (out.type == TR_BF16)
    store((bf16*)out.at + number, x);
  else
    store((fp16*)out.at + number, x);
}

TR_INLINE void put(const Out& out, int64_t number, vf x, int n) {
  if (out.type == TR_F32)
    store((float*)out.at + number, x, n);
  else if (out.type == TR_BF16)
    store((bf16*)out.at + number, x, n);
  else
    store((fp16*)out.at + number, x, n);
}

// The vectors of a block, or the first `tail` columns of the last one.
template <int kVectors, class E>
TR_INLINE void put_all(E* at, const vf* sums, int tail) {
  if (kVectors == 0) store(at, sums[0], tail);
  for (int v = 0; v < kVectors; v++) store(at + v * kLanes, sums[v]);
}

template <class I>
struct Bags {
  const char* data;
  uint64_t rows;
  int64_t dim, row_bytes;
  const I* ids;
  int64_t id_count;
  const int64_t* offsets;
  const float* weights;
  bool mean;
  int64_t last;  // end of the ids whose rows this part may prefetch
  Out out;
  LookupFault* fault;
};

// Sums kVectors vectors from column `column` on, or (kVectors 0) its first `tail` columns. Returns false on an error, which
// ends the part.
template <int kVectors, bool kWeighted, class E, class I>
__attribute__((noinline))  // a separate function, so that the loop has all registers
bool sum_columns(const Bags<I>& bags, int64_t column, int tail, int64_t begin, int64_t end) {
  constexpr int kRegisters = kVectors > 0 ? kVectors : 1;
  using Row = RowReader<E>;
  constexpr int kBytes = kRegisters * kLanes * Row::kBits / 8 + Row::kHeadBytes;
  const char* const data = bags.data;
  const uint64_t rows = bags.rows, row_bytes = (uint64_t)bags.row_bytes;
  const uint64_t block = (uint64_t)(column * Row::kBits / 8);  // of later blocks, `kBytes` begins at the row's last head bytes
  const int64_t last = bags.last - 1, far = ahead(kBytes);
  const I* const ids = bags.ids;
  const int64_t* const offsets = bags.offsets;
  const float* const weights = bags.weights;
  const int64_t id_count = bags.id_count;
  const bool mean = bags.mean;
  const Out out = bags.out;
  int64_t start = offsets[begin];
  for (int64_t b = begin; b < end; b++) {
    const int64_t stop = offsets[b + 1];
    if (__builtin_expect(start < 0 || stop < start || stop > id_count, 0)) {
      bool first = start < 0 || start > id_count;
      *bags.fault = {TR_BAD_OFFSETS, first ? b : b + 1, first ? start : stop};
      return false;
    }
    vf sums[kRegisters];
    for (int v = 0; v < kRegisters; v++) sums[v] = vf{};
    for (int64_t p = start; p < stop; p++) {
      const int64_t later = p + far < last ? p + far : last;
      ask_for<kBytes>((const char*)((uintptr_t)data + (uint64_t)(int64_t)ids[later] * row_bytes + block));
      const uint64_t id = (uint64_t)(int64_t)ids[p];
      if (__builtin_expect(id >= rows, 0)) {
        *bags.fault = {TR_BAD_ID, p, (int64_t)id};
        return false;
      }
      const Row row(data + id * row_bytes, column);
      if (kVectors == 0) {
        vf x = row.first(tail);
        sums[0] += kWeighted ? splat(weights[p]) * x : x;
      } else if (kWeighted) {
        const vf w = splat(weights[p]);
        for (int v = 0; v < kRegisters; v++) sums[v] += w * row.get(v);
      } else {
        for (int v = 0; v < kRegisters; v++) sums[v] += row.get(v);
      }
    }
    if (mean && stop - start > 1) {
      const vf count = splat((float)(stop - start));
      for (int v = 0; v < kRegisters; v++) sums[v] /= count;
    }
    const int64_t number = b * out.stride + column;
    if (out.type == TR_F32)
      put_all<kVectors>((float*)out.at + number, sums, tail);
    else if (out.type == TR_BF16)
      put_all<kVectors>((bf16*)out.at + number, sums, tail);
    else
      put_all<kVectors>((fp16*)out.at + number, sums, tail);
    start = stop;
  }
  return true;
}

template <bool kWeighted, class E, class I>
bool sum_group(const Bags<I>& bags, int64_t begin, int64_t end) {
  int64_t column = 0;
  for (int64_t left = bags.dim; left > 0; left = bags.dim - column) {
    bool fine;
    if (left >= 20 * kLanes) {  // wide rows: fewer passes over the ids
      fine = sum_columns<12, kWeighted, E>(bags, column, 0, begin, end);
      column += 12 * kLanes;
    } else if (left >= 8 * kLanes) {
      fine = sum_columns<8, kWeighted, E>(bags, column, 0, begin, end);
      column += 8 * kLanes;
    } else if (left >= 4 * kLanes) {
      fine = sum_columns<4, kWeighted, E>(bags, column, 0, begin, end);
      column += 4 * kLanes;
    } else if (left >= 2 * kLanes) {
      fine = sum_columns<2, kWeighted, E>(bags, column, 0, begin, end);
      column += 2 * kLanes;
    } else if (left >= kLanes) {
      fine = sum_columns<1, kWeighted, E>(bags, column, 0, begin, end);
      column += kLanes;
    } else {
      fine = sum_columns<0, kWeighted, E>(bags, column, (int)left, begin, end);
      column += left;
    }
    if (!fine) return false;
  }
  return true;
}

bool one_pass(int64_t dim) {
  for (int vectors = 1; vectors <= 8; vectors *= 2)
    if (dim == vectors * kLanes) return true;
  return dim < kLanes;
}

template <class E, class I>
LookupFault pooled(const LookupPart& part) {
  const LookupFeature& f = *part.feature;
  const tr_lookup& call = *part.call;
  LookupFault fault = {TR_OK, 0, 0};
  const int64_t size = call.number_type == TR_F32 ? 4 : 2;
  int64_t last = f.offsets[part.end];
  last = last < 1 ? 1 : last > call.id_count ? call.id_count : last;
  Bags<I> bags = {(const char*)f.data, f.rows, f.dim, f.row_bytes, (const I*)call.ids, call.id_count, f.offsets,
                  call.sample_weights, f.mean, last,
                  {(char*)call.numbers + f.numbers_start * size, call.number_type, f.numbers_stride}, &fault};
  int64_t begin = part.begin;
  while (begin < part.end) {
    int64_t end = part.end;
    if (!one_pass(f.dim))
      for (end = begin + 1; end < part.end && f.offsets[end + 1] - f.offsets[begin] <= kGroupRows;) end++;
    if (!(call.sample_weights ? sum_group<true, E>(bags, begin, end) : sum_group<false, E>(bags, begin, end))) break;
    begin = end;
  }
  return fault;
}

// ---- row by row

// Copies kBytes (or, if 0, `bytes`) bytes.
template <int kBytes>
TR_INLINE void copy_row(const char* from, char* to, int64_t bytes) {
  constexpr int64_t kStep = 4 * kLanes;
  const int64_t count = kBytes ? kBytes : bytes;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) store((float*)(to + i), load((const float*)(from + i)));
  if (kBytes % kStep || !kBytes) {
    for (; i + 4 <= count; i += 4) memcpy(to + i, from + i, 4);
    if (i < count) memcpy(to + i, from + i, 2);
  }
}

#if defined(__x86_64__)
// The same with non-temporal stores; kBytes and both pointers are multiples of a vector.
template <int kBytes>
TR_INLINE void stream_row(const char* from, char* to, int64_t) {
  for (int i = 0; i < kBytes; i += 4 * kLanes) {
    vf x = load((const float*)(from + i));
#if defined(__AVX512F__)
    _mm512_stream_ps((float*)(to + i), (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps((float*)(to + i), (__m256)x);
#else
    typedef float v4 __attribute__((vector_size(16)));
    __builtin_ia32_movntps((float*)(to + i), (v4)x);
#endif
  }
}
#endif

template <class I>
struct Rows {
  const char* data;
  uint64_t rows;
  int64_t bytes;  // of a row
  const I* ids;
  char* out;      // of id 0
  LookupFault* fault;
};

template <int kBytes, bool kStream, class I>
void copy_rows(const Rows<I>& rows, int64_t begin, int64_t end) {
  const int64_t bytes = kBytes ? kBytes : rows.bytes, far = ahead(bytes);
  for (int64_t p = begin; p < end; p++) {
    const int64_t later = p + far < end ? p + far : end - 1;
    const char* coming = (const char*)((uintptr_t)rows.data + (uint64_t)(int64_t)rows.ids[later] * (uint64_t)bytes);
    if (kBytes) {
      ask_for<kBytes>(coming);
    } else {
      prefetch_row(coming, (size_t)bytes);
      __builtin_prefetch(coming + bytes - 1, 0, 3);
    }
    const uint64_t id = (uint64_t)(int64_t)rows.ids[p];
    if (__builtin_expect(id >= rows.rows, 0)) {
      *rows.fault = {TR_BAD_ID, p, (int64_t)id};
      return;
    }
    const char* from = rows.data + (int64_t)id * bytes;
    char* to = rows.out + p * bytes;
#if defined(__x86_64__)
    if (kStream) {
      stream_row<kBytes>(from, to, bytes);
      continue;
    }
#endif
    copy_row<kBytes>(from, to, bytes);
  }
}

template <int kBytes, class I>
void copy_rows(const Rows<I>& rows, int64_t begin, int64_t end, bool stream) {
#if defined(__x86_64__)
  if (stream && kBytes % (4 * kLanes) == 0 && (uintptr_t)rows.out % (4 * kLanes) == 0) {
    copy_rows<kBytes, true>(rows, begin, end);
    __builtin_ia32_sfence();
    return;
  }
#endif
  copy_rows<kBytes, false>(rows, begin, end);
}

template <class I>
LookupFault sequence_same(const LookupPart& part) {
  const LookupFeature& f = *part.feature;
  const tr_lookup& call = *part.call;
  LookupFault fault = {TR_OK, 0, 0};
  const int64_t bytes = f.row_bytes;
  const Rows<I> rows = {(const char*)f.data, f.rows, bytes, (const I*)call.ids, (char*)call.numbers, &fault};
  switch (bytes) {
    case 32: copy_rows<32>(rows, part.begin, part.end, part.stream); break;
    case 64: copy_rows<64>(rows, part.begin, part.end, part.stream); break;
    case 128: copy_rows<128>(rows, part.begin, part.end, part.stream); break;
    case 256: copy_rows<256>(rows, part.begin, part.end, part.stream); break;
    case 512: copy_rows<512>(rows, part.begin, part.end, part.stream); break;
    case 1024: copy_rows<1024>(rows, part.begin, part.end, part.stream); break;
    default: copy_rows<0, false>(rows, part.begin, part.end);
  }
  return fault;
}

template <class E, class I>
LookupFault sequence_other(const LookupPart& part) {
  const LookupFeature& f = *part.feature;
  const tr_lookup& call = *part.call;
  const I* ids = (const I*)call.ids;
  const Out out = {call.numbers, call.number_type, f.dim};
  const int64_t dim = f.dim, bytes = f.row_bytes, far = ahead(bytes);
  for (int64_t p = part.begin; p < part.end; p++) {
    const int64_t later = p + far < part.end ? p + far : part.end - 1;
    prefetch_row((const char*)((uintptr_t)f.data + (uint64_t)(int64_t)ids[later] * (uint64_t)bytes), (size_t)bytes);
    const uint64_t id = (uint64_t)(int64_t)ids[p];
    if (__builtin_expect(id >= f.rows, 0)) return {TR_BAD_ID, p, (int64_t)id};
    const RowReader<E> row((const char*)f.data + (int64_t)id * bytes, 0);
    const int whole = (int)(dim / kLanes), rest = (int)(dim % kLanes);
    for (int v = 0; v < whole; v++) put(out, p * dim + v * kLanes, row.get(v));
    if (rest) {
      const RowReader<E> end((const char*)f.data + (int64_t)id * bytes, whole * kLanes);
      put(out, p * dim + whole * kLanes, end.first(rest), rest);
    }
  }
  return {TR_OK, 0, 0};
}

// ---- gradients of sample weights

typedef int32_t vi8 __attribute__((vector_size(32)));

// Eight numbers as fp32, on every level.
template <class E>
TR_INLINE vf8 load8(const E* p) {
#if defined(__AVX512F__)
  vf x = load(p, 8);
  return (vf8)_mm512_castps512_ps256((__m512)x);
#elif defined(__AVX2__)
  return (vf8)load(p);
#else
  vf low = load(p), high = load(p + 4);
  return (vf8){low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#endif
}

template <class E, class I>
LookupFault sample_grads(const LookupPart& part) {
  const LookupFeature& f = *part.feature;
  const tr_lookup& call = *part.call;
  const I* const ids = (const I*)call.ids;
  const E* const data = (const E*)f.data;
  const int64_t dim = f.dim, whole = dim & ~(int64_t)7, far = ahead(dim * (int64_t)sizeof(E));
  int64_t last = f.offsets[part.end];
  last = (last < 1 ? 1 : last > call.id_count ? call.id_count : last) - 1;
  float* const grad = part.scratch;
  for (int64_t b = part.begin; b < part.end; b++) {
    const int64_t start = f.offsets[b], stop = f.offsets[b + 1];
    if (start < 0 || stop < start || stop > call.id_count) {
      bool first = start < 0 || start > call.id_count;
      return {TR_BAD_OFFSETS, first ? b : b + 1, first ? start : stop};
    }
    const int64_t number = f.numbers_start + b * f.numbers_stride;
    const float count = f.mean && stop > start ? (float)(stop - start) : 1.0f;
    for (int64_t c = 0; c < dim; c += kLanes) {
      const int n = (int)(dim - c < kLanes ? dim - c : kLanes);
      vf x = call.number_type == TR_F32    ? load((const float*)call.numbers + number + c, n)
             : call.number_type == TR_BF16 ? load((const bf16*)call.numbers + number + c, n)
                                           : load((const fp16*)call.numbers + number + c, n);
      store(grad + c, x / splat(count), n);
    }
    for (int64_t p = start; p < stop; p++) {
      const int64_t later = p + far < last ? p + far : last;
      prefetch_row((const char*)((uintptr_t)data + (uint64_t)(int64_t)ids[later] * (uint64_t)dim * sizeof(E)),
                   (size_t)dim * sizeof(E));
      const uint64_t id = (uint64_t)(int64_t)ids[p];
      if (__builtin_expect(id >= f.rows, 0)) return {TR_BAD_ID, p, (int64_t)id};
      const E* const row = data + (int64_t)id * dim;
      vf8 sum = {};
      for (int64_t c = 0; c < whole; c += 8) sum += load8(row + c) * load8(grad + c);
      if (whole < dim) {
        vf8 rest = {};
        for (int64_t c = whole; c < dim; c++) rest[c - whole] = load_one(row + c) * grad[c];
        sum += rest;
      }
      call.sample_grads[p] += ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    }
  }
  return {TR_OK, 0, 0};
}

}  // namespace

// Calls `name` for the types of rows and ids; quantized rows have no gradients.
#define TR_BY_FLOATS(name, part, I, others) \
  (part.feature->type == TR_F32 ? name<float, I>(part) : part.feature->type == TR_BF16 ? name<bf16, I>(part) : others)
#define TR_BY_TYPES(name, part, I)                                           \
  TR_BY_FLOATS(name, part, I,                                                \
               (part.feature->type == TR_F16      ? name<fp16, I>(part)      \
                : part.feature->type == TR_CODES8 ? name<codes<8>, I>(part)  \
                : part.feature->type == TR_CODES4 ? name<codes<4>, I>(part)  \
                                                  : name<codes<2>, I>(part)))

LookupFault pooled_part(const LookupPart& part) {
  if (part.call->index_type == TR_I32) return TR_BY_TYPES(pooled, part, int32_t);
  return TR_BY_TYPES(pooled, part, int64_t);
}

LookupFault sequence_part(const LookupPart& part) {
  if (part.feature->type == part.call->number_type)
    return part.call->index_type == TR_I32 ? sequence_same<int32_t>(part) : sequence_same<int64_t>(part);
  if (part.call->index_type == TR_I32) return TR_BY_TYPES(sequence_other, part, int32_t);
  return TR_BY_TYPES(sequence_other, part, int64_t);
}

LookupFault sample_weight_part(const LookupPart& part) {
  if (part.call->index_type == TR_I32)
    return TR_BY_FLOATS(sample_grads, part, int32_t, (sample_grads<fp16, int32_t>(part)));
  return TR_BY_FLOATS(sample_grads, part, int64_t, (sample_grads<fp16, int64_t>(part)));
}

}  // namespace TILEREC_ISA
}  // namespace tilerec
