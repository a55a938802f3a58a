// pack.inl: rows of storage into scratch: converted, biased, and for K transposed into the panels that the tile product reads.

// Lanes of two vectors, exchanged within 128 bits: the lower (kHigh = 0) or upper halves, kWidth elements at a time.
template <class T, int kWidth, int kHigh>
struct Interleave {
  static constexpr int per_block = 16 / static_cast<int>(sizeof(T));
  static constexpr int at(int i) {
    const int block = i / per_block, within = i % per_block;
    const int group = within / kWidth, source = group % 2;
    return source * kLanes<T> + block * per_block + kHigh * per_block / 2 + group / 2 * kWidth + within % kWidth;
  }
};
// The even (kOdd = 0) or odd 128-bit blocks of a, then those of b.
template <class T, int kOdd>
struct EveryOtherBlock {
  static constexpr int per_block = 16 / static_cast<int>(sizeof(T)), blocks = kLanes<T> / per_block;
  static constexpr int at(int i) {
    const int source_block = 2 * (i / per_block) + kOdd;
    return (source_block / blocks) * kLanes<T> + source_block % blocks * per_block + i % per_block;
  }
};

// In place: v[i] lane j <-> v[j] lane i.
template <class T>
ONNX_ATTN_INLINE void transpose(Vector<T> (&v)[kLanes<T>]) {
  constexpr int L = kLanes<T>, per_block = 16 / static_cast<int>(sizeof(T)), blocks = L / per_block;
  // Within each 128-bit block: afterwards v[g * per_block + c] holds column c of every block, for the rows of group g.
#pragma GCC unroll 16
  for (int g = 0; g < L; g += per_block) {
    if constexpr (per_block == 4) {
      const Vector<T> low01 = shuffle<T, Interleave<T, 1, 0>>(v[g], v[g + 1]), high01 = shuffle<T, Interleave<T, 1, 1>>(v[g], v[g + 1]);
      const Vector<T> low23 = shuffle<T, Interleave<T, 1, 0>>(v[g + 2], v[g + 3]);
      const Vector<T> high23 = shuffle<T, Interleave<T, 1, 1>>(v[g + 2], v[g + 3]);
      v[g] = shuffle<T, Interleave<T, 2, 0>>(low01, low23), v[g + 1] = shuffle<T, Interleave<T, 2, 1>>(low01, low23);
      v[g + 2] = shuffle<T, Interleave<T, 2, 0>>(high01, high23), v[g + 3] = shuffle<T, Interleave<T, 2, 1>>(high01, high23);
    } else {
      const Vector<T> low = shuffle<T, Interleave<T, 1, 0>>(v[g], v[g + 1]), high = shuffle<T, Interleave<T, 1, 1>>(v[g], v[g + 1]);
      v[g] = low, v[g + 1] = high;
    }
  }
  // Whole blocks: block b of group g goes to block g of row b * per_block + c.
#pragma GCC unroll 4
  for (int c = 0; c < per_block; ++c) {
    if constexpr (blocks == 2) {
      const Vector<T> even = shuffle<T, EveryOtherBlock<T, 0>>(v[c], v[per_block + c]);
      v[per_block + c] = shuffle<T, EveryOtherBlock<T, 1>>(v[c], v[per_block + c]);
      v[c] = even;
    } else if constexpr (blocks == 4) {
      const Vector<T> even01 = shuffle<T, EveryOtherBlock<T, 0>>(v[c], v[per_block + c]);
      const Vector<T> odd01 = shuffle<T, EveryOtherBlock<T, 1>>(v[c], v[per_block + c]);
      const Vector<T> even23 = shuffle<T, EveryOtherBlock<T, 0>>(v[2 * per_block + c], v[3 * per_block + c]);
      const Vector<T> odd23 = shuffle<T, EveryOtherBlock<T, 1>>(v[2 * per_block + c], v[3 * per_block + c]);
      v[c] = shuffle<T, EveryOtherBlock<T, 0>>(even01, even23);
      v[2 * per_block + c] = shuffle<T, EveryOtherBlock<T, 1>>(even01, even23);
      v[per_block + c] = shuffle<T, EveryOtherBlock<T, 0>>(odd01, odd23);
      v[3 * per_block + c] = shuffle<T, EveryOtherBlock<T, 1>>(odd01, odd23);
    }
  }
}

// Element `column` and its followers of one row; zeros from `size` on. The bias is padded to whole vectors; null: none.
template <class T, class Storage>
ONNX_ATTN_INLINE Vector<T> load_row(const Storage* row, const T* bias, int64_t column, int64_t size) {
  const int64_t left = size - column;
  const Vector<T> value = left >= kLanes<T> ? load_as<T>(row + column) : load_partial<T>(row + column, left);
  return bias ? value + load(bias + column) : value;
}

// panels[p][d][0 ... panel width) = element d of the panel's keys. Lanes behind `count` repeat the last key; they are masked later.
template <class T, class Storage>
static void pack_transposed(const void* const* rows, int64_t count, int64_t size, const T* bias, T* panels) {
  constexpr int L = kLanes<T>, width = kPanelVectors * L;
  for (int64_t key = 0; key < count; key += L) {
    const Storage* source[L];
    for (int i = 0; i < L; ++i) source[i] = static_cast<const Storage*>(rows[key + i < count ? key + i : count - 1]);
    T* target = panels + key / width * width * size + key % width;
    for (int64_t d = 0; d < size; d += L) {
      Vector<T> block[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) block[i] = load_row<T>(source[i], bias, d, size);
      transpose<T>(block);
      if (size - d >= L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store(target + (d + i) * width, block[i]);
      } else {
        for (int64_t i = 0; i < size - d; ++i) store(target + (d + i) * width, block[i]);
      }
    }
  }
}

// target[i][0 ... padded) = row i, converted and biased; zeros from `size` on.
template <class T, class Storage>
static void pack_rows(const void* const* rows, int64_t count, int64_t size, const T* bias, int64_t padded, T* target) {
  for (int64_t i = 0; i < count; ++i) {
    const Storage* source = static_cast<const Storage*>(rows[i]);
    for (int64_t d = 0; d < padded; d += kLanes<T>) {
      store(target + i * padded + d, d < size ? load_row<T>(source, bias, d, size) : Vector<T>{});
    }
  }
}

// The same with a run-time type of the rows.
template <class T>
static void pack_transposed_any(DType dtype, const void* const* rows, int64_t count, int64_t size, const T* bias, T* panels) {
  switch (dtype) {
    case DType::f64: return pack_transposed<T, double>(rows, count, size, bias, panels);
    case DType::f32: return pack_transposed<T, float>(rows, count, size, bias, panels);
    case DType::f16: return pack_transposed<T, Float16>(rows, count, size, bias, panels);
    default: return pack_transposed<T, BFloat16>(rows, count, size, bias, panels);
  }
}
template <class T>
static void pack_rows_any(DType dtype, const void* const* rows, int64_t count, int64_t size, const T* bias, int64_t padded, T* target) {
  switch (dtype) {
    case DType::f64: return pack_rows<T, double>(rows, count, size, bias, padded, target);
    case DType::f32: return pack_rows<T, float>(rows, count, size, bias, padded, target);
    case DType::f16: return pack_rows<T, Float16>(rows, count, size, bias, padded, target);
    default: return pack_rows<T, BFloat16>(rows, count, size, bias, padded, target);
  }
}

template <class T, class Storage>
static void store_row(const T* source, int64_t count, Storage* target) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) store_as<T>(target + i, load(source + i));
  for (; i < count; ++i) from<T>(source[i], target + i);
}
// count compute values into row storage at element `offset` of `base`.
template <class T>
static void store_row_any(DType dtype, const T* source, int64_t count, void* base, int64_t offset) {
  switch (dtype) {
    case DType::f64: return store_row<T>(source, count, static_cast<double*>(base) + offset);
    case DType::f32: return store_row<T>(source, count, static_cast<float*>(base) + offset);
    case DType::f16: return store_row<T>(source, count, static_cast<Float16*>(base) + offset);
    default: return store_row<T>(source, count, static_cast<BFloat16*>(base) + offset);
  }
}
