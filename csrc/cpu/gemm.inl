// gemm.inl: register-tiled products of rows of scratch with packed columns.

// c[i][:] = c[i][:] * factors[i] + sum over k of a[i][k] * b[k][:], for kRows rows and kVectors vectors of columns held in registers.
// Without kAccumulate c starts at 0.
template <class T, bool kAccumulate, int kRows, int kVectors>
static void register_tile(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, T* c, int64_t c_stride,
                          const T* factors) {
  constexpr int L = kLanes<T>;
  Vector<T> sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kAccumulate)
        sums[i][j] = load(c + i * c_stride + j * L) * factors[i];
      else
        sums[i][j] = Vector<T>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> columns[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) columns[j] = load(b + k * b_stride + j * L);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vector<T> value = splat<T>(a[i * a_stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sums[i][j] += value * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) store(c + i * c_stride + j * L, sums[i][j]);
  }
}

template <class T, bool kAccumulate, int kVectors>
static void multiply_columns(const T* a, int64_t a_stride, int64_t rows, const T* b, int64_t b_stride, int64_t depth, T* c,
                             int64_t c_stride, const T* factors) {
  int64_t i = 0;
  const auto advance = [&](auto count) __attribute__((always_inline)) {
    constexpr int kRows = decltype(count)::value;
    register_tile<T, kAccumulate, kRows, kVectors>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride, c_stride, factors + i);
    i += kRows;
  };
  while (rows - i >= 6) advance(std::integral_constant<int, 6>{});
  if (rows - i >= 4) advance(std::integral_constant<int, 4>{});
  if (rows - i >= 2) advance(std::integral_constant<int, 2>{});
  if (rows - i >= 1) advance(std::integral_constant<int, 1>{});
}

// The same for up to kPanelVectors vectors of columns.
template <class T, bool kAccumulate>
static void multiply(const T* a, int64_t a_stride, int64_t rows, const T* b, int64_t b_stride, int64_t depth, T* c, int64_t c_stride,
                     int vectors, const T* factors) {
  while (vectors > 0) {
    const int taken = vectors >= 4 && kPanelVectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
    if (taken == 4)
      multiply_columns<T, kAccumulate, kPanelVectors>(a, a_stride, rows, b, b_stride, depth, c, c_stride, factors);
    else if (taken == 2)
      multiply_columns<T, kAccumulate, 2>(a, a_stride, rows, b, b_stride, depth, c, c_stride, factors);
    else
      multiply_columns<T, kAccumulate, 1>(a, a_stride, rows, b, b_stride, depth, c, c_stride, factors);
    b += taken * kLanes<T>;
    c += taken * kLanes<T>;
    vectors -= taken;
  }
}
