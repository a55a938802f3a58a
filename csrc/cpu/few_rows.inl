// few_rows.inl: products for a handful of query rows, as in decoding: K and V are read once, in place and in their own type, and
// the rows that come next are asked for meanwhile, since memory is what such calls wait for.

// Rows to prefetch, one for each row that is read.
struct Ahead {
  const void* const* rows = nullptr;
  int64_t bytes = 0;
  inline __attribute__((always_inline)) void ask(int64_t row) const {
    for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(rows[row]) + offset, 0, 2);
  }
};

// scores[i][j] = dot(queries row i, key row j) for kRows rows and kKeys keys; `length` is a multiple of the lanes.
template <class T, class Storage, int kRows, int kKeys>
static void dot_tile(const T* queries, int64_t query_stride, const void* const* keys, int64_t length, T* scores) {
  Vector<T> sums[kRows][kKeys] = {};
  for (int64_t d = 0; d < length; d += kLanes<T>) {
    Vector<T> query[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) query[i] = load(queries + i * query_stride + d);
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) {
      const Vector<T> key = load_as<T>(static_cast<const Storage*>(keys[j]) + d);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sums[i][j] += query[i] * key;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) scores[i * kKeyTile + j] = reduce_add<T>(sums[i][j]);
  }
}

template <class T, class Storage, int kRows>
static void dot_rows(const T* queries, int64_t query_stride, const void* const* keys, int64_t count, int64_t length, T* scores,
                     const Ahead& ahead) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    for (int64_t i = j; i < j + 4; ++i) ahead.ask(i);
    dot_tile<T, Storage, kRows, 4>(queries, query_stride, keys + j, length, scores + j);
  }
  for (; j < count; ++j) dot_tile<T, Storage, kRows, 1>(queries, query_stride, keys + j, length, scores + j);
}

template <class T, class Storage>
static void dot_products(const T* queries, int64_t query_stride, int64_t rows, const void* const* keys, int64_t count, int64_t length,
                         T* scores, Ahead ahead) {
  const auto advance = [&](auto taken) {
    constexpr int kRows = decltype(taken)::value;
    dot_rows<T, Storage, kRows>(queries, query_stride, keys, count, length, scores, ahead);
    queries += kRows * query_stride, scores += kRows * kKeyTile, rows -= kRows;
    ahead.bytes = 0;  // once is enough
  };
  while (rows >= 4) advance(std::integral_constant<int, 4>{});
  if (rows >= 2) advance(std::integral_constant<int, 2>{});
  if (rows >= 1) advance(std::integral_constant<int, 1>{});
}

// sums[i][:] = sums[i][:] * factors[i] + sum over k of weights[i][k] * (row k of V)[:], for kVectors vectors of columns.
template <class T, class Storage, int kRows, int kVectors>
static void sum_tile(const T* weights, const void* const* values, int64_t count, int64_t column, T* sums, int64_t stride, const T* factors,
                     const Ahead& ahead) {
  constexpr int L = kLanes<T>;
  Vector<T> totals[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) totals[i][j] = load(sums + i * stride + column + j * L) * factors[i];
  }
  for (int64_t k = 0; k < count; ++k) {
    const Storage* row = static_cast<const Storage*>(values[k]) + column;
    Vector<T> value[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) value[j] = load_as<T>(row + j * L);
    ahead.ask(k);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vector<T> weight = splat<T>(weights[i * kKeyTile + k]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) totals[i][j] += weight * value[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) store(sums + i * stride + column + j * L, totals[i][j]);
  }
}

template <class T, class Storage, int kVectors>
static void sum_columns(const T* weights, int64_t rows, const void* const* values, int64_t count, int64_t column, T* sums, int64_t stride,
                        const T* factors, Ahead& ahead) {
  const auto advance = [&](auto taken) {
    constexpr int kRows = decltype(taken)::value;
    sum_tile<T, Storage, kRows, kVectors>(weights, values, count, column, sums, stride, factors, ahead);
    weights += kRows * kKeyTile, sums += kRows * stride, factors += kRows, rows -= kRows;
    ahead.bytes = 0;
  };
  while (rows >= 4) advance(std::integral_constant<int, 4>{});
  if (rows >= 2) advance(std::integral_constant<int, 2>{});
  if (rows >= 1) advance(std::integral_constant<int, 1>{});
}

// The same for `width` columns, a multiple of the lanes.
template <class T, class Storage>
static void weighted_sums(const T* weights, int64_t rows, const void* const* values, int64_t count, int64_t width, T* sums, int64_t stride,
                          const T* factors, Ahead ahead) {
  constexpr int L = kLanes<T>;
  int64_t column = 0;
  for (; column + 4 * L <= width && kPanelVectors >= 4; column += 4 * L) {
    sum_columns<T, Storage, kPanelVectors>(weights, rows, values, count, column, sums, stride, factors, ahead);
  }
  for (; column + 2 * L <= width; column += 2 * L)
    sum_columns<T, Storage, 2>(weights, rows, values, count, column, sums, stride, factors, ahead);
  for (; column < width; column += L) sum_columns<T, Storage, 1>(weights, rows, values, count, column, sums, stride, factors, ahead);
}

// The same with a run-time storage type, one that reads_in_place() allows.
template <class T>
static void dot_products_any(DType dtype, const T* queries, int64_t query_stride, int64_t rows, const void* const* keys, int64_t count,
                             int64_t length, T* scores, const Ahead& ahead) {
  if constexpr (sizeof(T) == 4) {
    if (dtype == DType::f16) return dot_products<T, Float16>(queries, query_stride, rows, keys, count, length, scores, ahead);
    if (dtype == DType::bf16) return dot_products<T, BFloat16>(queries, query_stride, rows, keys, count, length, scores, ahead);
  }
  dot_products<T, T>(queries, query_stride, rows, keys, count, length, scores, ahead);
}
template <class T>
static void weighted_sums_any(DType dtype, const T* weights, int64_t rows, const void* const* values, int64_t count, int64_t width, T* sums,
                              int64_t stride, const T* factors, const Ahead& ahead) {
  if constexpr (sizeof(T) == 4) {
    if (dtype == DType::f16) return weighted_sums<T, Float16>(weights, rows, values, count, width, sums, stride, factors, ahead);
    if (dtype == DType::bf16) return weighted_sums<T, BFloat16>(weights, rows, values, count, width, sums, stride, factors, ahead);
  }
  weighted_sums<T, T>(weights, rows, values, count, width, sums, stride, factors, ahead);
}
template <class T>
static bool reads_in_place(DType dtype) {
  return sizeof(T) == 4 ? dtype != DType::f64 : dtype == DType::f64;
}
