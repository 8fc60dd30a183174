// Search of items (tilerec/ops/search/definition.py specifies the op).
#include "../search.h"

#include <cmath>
#include <cstring>

#include "ops.h"

namespace tilerec::ops {
namespace {

const char* const kOp = "best_rows";
constexpr int64_t kMostColumns = 1 << 16;  // larger sums of int8 products would not fit into int32

int64_t address(const Tensor& tensor) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.data_ptr())); }

Tensor of_type(const char* name, const Tensor& tensor, ScalarType type, const Sizes& sizes) {
  Tensor found = dense(kOp, name, tensor, static_cast<int64_t>(sizes.size()));
  bool fits = found.scalar_type() == type;
  for (size_t at = 0; at < sizes.size(); ++at) fits = fits && found.size(static_cast<int64_t>(at)) == sizes[at];
  if (!fits) fail(std::string(kOp) + ": got " + name + " of another type or size; expected those of the index. Export the model again.");
  return found;
}

// Copies queries to rows of `width` numbers, the rest zeros.
Tensor padded(const float* query, int64_t batch, int64_t dim, int64_t width) {
  Tensor out = new_tensor({batch, width}, ScalarType::Float);
  auto* to = static_cast<float*>(out.data_ptr());
  for (int64_t q = 0; q < batch; ++q, query += dim, to += width) {
    std::memcpy(to, query, static_cast<size_t>(dim) * sizeof(float));
    std::memset(to + dim, 0, static_cast<size_t>(width - dim) * sizeof(float));
  }
  return out;
}

// Codes of queries, in rows of `width` numbers, the rest zeros; their scales and sums.
Tensor codes_of(const float* query, int64_t batch, int64_t dim, int64_t width, float* scales, int32_t* sums) {
  Tensor out = new_tensor({batch, width}, ScalarType::Char);
  auto* to = static_cast<int8_t*>(out.data_ptr());
  for (int64_t q = 0; q < batch; ++q, query += dim, to += width) {
    float largest = 0;
    for (int64_t at = 0; at < dim; ++at) largest = std::max(largest, std::fabs(query[at]));
    const float scale = largest / 127.0f;
    int32_t sum = 0;
    std::memset(to, 0, static_cast<size_t>(width));
    // A query of zeros, or of numbers too small for a scale, has codes of 0.
    for (int64_t at = 0; at < (scale > 0 ? dim : 0); ++at) {
      to[at] = static_cast<int8_t>(std::min(std::max(std::nearbyint(query[at] / scale), -127.0f), 127.0f));
      sum += to[at];
    }
    scales[q] = scale, sums[q] = sum;
  }
  return out;
}

}  // namespace

Two best_rows(Tensor query, Tensor rows, Tensor scale, Tensor words, Tensor first, Tensor last, Tensor required, Tensor forbidden,
              int64_t k) {
  query = dense(kOp, "queries", query, 2), rows = dense(kOp, "rows", rows, 2), first = dense(kOp, "ranges", first, 2);
  const int64_t batch = query.size(0), dim = query.size(1), count = rows.size(0), ranges = first.size(1);
  const bool int8 = rows.scalar_type() == ScalarType::Char;
  if (query.scalar_type() != ScalarType::Float || dim != rows.size(1))
    fail(std::string(kOp) + ": got queries of " + text(dim) + " numbers; expected float32 [B, " + text(rows.size(1)) +
         "]. Use the tower of these rows.");
  if ((!int8 && rows.scalar_type() != ScalarType::Float) || dim > kMostColumns || k < 0)
    fail(std::string(kOp) + ": got rows of another form, or k=" + text(k) + "; expected float32 or int8 with at most " +
         text(kMostColumns) + " columns, and k of at least 0. Convert them.");
  scale = of_type("scales", scale, ScalarType::Float, {int8 ? count : 0});
  words = of_type("words", words, ScalarType::Long, {count});
  first = of_type("ranges", first, ScalarType::Long, {batch, ranges}), last = of_type("ranges", last, ScalarType::Long, {batch, ranges});
  required = of_type("required flags", required, ScalarType::Long, {batch});
  forbidden = of_type("forbidden flags", forbidden, ScalarType::Long, {batch});
  const auto* numbers = static_cast<const float*>(query.data_ptr());
  for (int64_t at = 0; at < batch * dim; ++at)
    if (!std::isfinite(numbers[at]))
      fail(std::string(kOp) + ": got query " + text(at / dim) + " with values that are not finite; expected numbers. Check the "
           "input of the query tower, and its weights.");
  std::vector<float> query_scale(static_cast<size_t>(batch));
  std::vector<int32_t> query_sum(static_cast<size_t>(batch));
  const int64_t size = int8 ? 1 : 4, query_bytes = (dim * size + kSearchPadding - 1) / kSearchPadding * kSearchPadding;
  const Tensor queries = int8 ? codes_of(numbers, batch, dim, query_bytes, query_scale.data(), query_sum.data())
                              : padded(numbers, batch, dim, query_bytes / size);
  Tensor score = new_tensor({batch, k}, ScalarType::Float), place = new_tensor({batch, k}, ScalarType::Long);
  const SearchCall call{address(queries), address(rows), address(scale), address(words),
                        static_cast<int64_t>(reinterpret_cast<intptr_t>(query_scale.data())),
                        static_cast<int64_t>(reinterpret_cast<intptr_t>(query_sum.data())), address(first), address(last),
                        address(required), address(forbidden), address(score), address(place), batch, dim, count, ranges, k,
                        int8, query_bytes};
  if (tr_best_rows(&call, threads()) != TR_OK)
    fail(std::string(kOp) + ": out of memory for " + text(k) + " candidates of each of " + text(batch) + " queries.");
  return {score, place};
}

}  // namespace tilerec::ops
