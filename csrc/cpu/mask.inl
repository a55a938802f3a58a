// mask.inl: everything between a product and its exponential: softcap, tensor masks, padding, limits, and the score output.

// Score cells outside [begin, end) become -infinity; [from, to) are the cells at hand, whole vectors.
template <class T>
static void limit_row(T* scores, int64_t from, int64_t to, int64_t begin, int64_t end) {
  constexpr int L = kLanes<T>;
  using Index = typename IntegerOf<T>::type;
  begin = smaller(larger(begin, from), to), end = smaller(larger(end, from), to);
  Integers<T> lane{};
  for (int i = 0; i < L; ++i) lane[i] = i;
  for (int64_t j = from; j < to; j += L) {
    if (j >= begin && j + L <= end) continue;
    const Integers<T> index = lane + static_cast<Index>(j);
    const Integers<T> inside = (index >= static_cast<Index>(begin)) & (index < static_cast<Index>(end));
    store(scores + j, select<T>(inside, load(scores + j), splat<T>(kMinusInfinity<T>)));
  }
}

template <class T>
static void cap_row(T* scores, int64_t from, int64_t to, double softcap) {
  const T cap = static_cast<T>(softcap);
  for (int64_t j = from; j < to; j += kLanes<T>) store(scores + j, tanh<T>(load(scores + j) / cap) * cap);
}

template <class T>
static void keep_row(const uint8_t* keep, int64_t count, T* scores) {
  constexpr int L = kLanes<T>;
  int64_t j = 0;
  for (; j + L <= count; j += L) {
    const Integers<T> kept = load_bytes<T>(keep + j) != 0;
    store(scores + j, select<T>(kept, load(scores + j), splat<T>(kMinusInfinity<T>)));
  }
  for (; j < count; ++j) scores[j] = keep[j] ? scores[j] : kMinusInfinity<T>;
}

// -infinity excludes whatever the score is, NaN and +infinity included.
template <class T, class Storage>
static void bias_row(const Storage* bias, int64_t count, T* scores) {
  constexpr int L = kLanes<T>;
  const Vector<T> excluded = splat<T>(kMinusInfinity<T>);
  int64_t j = 0;
  for (; j + L <= count; j += L) {
    const Vector<T> added = load_as<T>(bias + j);
    store(scores + j, select<T>(added == excluded, excluded, load(scores + j) + added));
  }
  for (; j < count; ++j) {
    const T added = to<T>(bias[j]);
    scores[j] = added == kMinusInfinity<T> ? added : scores[j] + added;
  }
}

// One element of a tensor mask as an additive value. Finite doubles stay finite in float: a row of finite minima is not empty.
template <class T, class Storage>
ONNX_ATTN_INLINE T additive(Storage value) {
  if constexpr (sizeof(Storage) == 1)
    return value ? T(0) : kMinusInfinity<T>;
  else if constexpr (sizeof(Storage) <= sizeof(T))
    return to<T>(value);
  else {
    const bool finite = value - value == 0;
    return finite && value < -__FLT_MAX__ ? -__FLT_MAX__ : finite && value > __FLT_MAX__ ? __FLT_MAX__ : static_cast<T>(value);
  }
}

template <class T, class Storage>
static void stage_mask(const Storage* mask, int64_t stride, int64_t count, T* row) {
  if (stride == 1) {
    for (int64_t j = 0; j < count; ++j) row[j] = additive<T>(mask[j]);
  } else if (stride == 0) {
    const T value = additive<T>(mask[0]);
    for (int64_t j = 0; j < count; ++j) row[j] = value;
  } else {
    for (int64_t j = 0; j < count; ++j) row[j] = additive<T>(mask[j * stride]);
  }
}

template <class T>
static int64_t mask_element(const Unit<T>& unit, int64_t row, int64_t key) {
  const TensorMask& mask = unit.problem.mask.tensor;
  return unit.batch * mask.batch_stride + unit.head_of(row) * mask.head_stride + unit.position_of(row) * mask.query_stride +
         key * mask.key_stride;
}

// Adds or selects by the tensor mask on `count` cells from `key` on.
template <class T, class Storage>
static void mask_row(Unit<T>& unit, int64_t row, int64_t key, int64_t count, T* scores) {
  const TensorMask& mask = unit.problem.mask.tensor;
  const int64_t element = mask_element(unit, row, key);
  const Storage* data = static_cast<const Storage*>(mask.data) + element;
  if constexpr (sizeof(Storage) <= sizeof(T)) {
    if (mask.key_stride == 1) {
      if constexpr (sizeof(Storage) == 1)
        return keep_row<T>(data, count, scores);
      else
        return bias_row<T>(data, count, scores);
    }
  }
  // Rows that share their mask by broadcasting come one after the other.
  if (!unit.staged_mask.covers(element, key, count)) stage_mask<T>(data, mask.key_stride, count, unit.scratch.mask_row);
  bias_row<T, T>(unit.scratch.mask_row, count, scores);
}

template <class T>
static void mask_row_any(Unit<T>& unit, int64_t row, int64_t key, int64_t count, T* scores) {
  switch (unit.problem.mask.tensor.dtype) {
    case DType::boolean: return mask_row<T, uint8_t>(unit, row, key, count, scores);
    case DType::f64: return mask_row<T, double>(unit, row, key, count, scores);
    case DType::f32: return mask_row<T, float>(unit, row, key, count, scores);
    case DType::f16: return mask_row<T, Float16>(unit, row, key, count, scores);
    default: return mask_row<T, BFloat16>(unit, row, key, count, scores);
  }
}

// Rows of a tensor mask are far apart: asks for those of a tile while its scores are still being computed.
// Inline by force: GCC takes a function that only prefetches for one without effect, and deletes its calls.
template <class T>
ONNX_ATTN_INLINE void prefetch_mask(const Unit<T>& unit, int64_t first, int64_t count, int64_t key, int64_t keys) {
  const TensorMask& mask = unit.problem.mask.tensor;
  if (mask.kind == TensorMask::Kind::none || mask.key_stride != 1 || mask.query_stride == 0) return;
  const int64_t bytes = element_bytes(mask.dtype);
  for (int64_t row = first; row < first + count; ++row) {
    const char* begin = static_cast<const char*>(mask.data) + mask_element(unit, row, key) * bytes;
    for (int64_t offset = 0; offset < keys * bytes; offset += 64) __builtin_prefetch(begin + offset, 0, 2);
  }
}

template <class T, class Number>
static void stage_padding(const Number* mask, int64_t stride, int64_t count, T filter, T* row) {
  if (stride == 1) {
    for (int64_t j = 0; j < count; ++j) row[j] = mask[j] > 0 ? T(0) : filter;
  } else {
    for (int64_t j = 0; j < count; ++j) row[j] = mask[j * stride] > 0 ? T(0) : filter;
  }
}

// Adds the padding filter on `count` cells from `key` on.
template <class T>
static void pad_row(Unit<T>& unit, int64_t row, int64_t key, int64_t count, T* scores) {
  const Padding& padding = unit.problem.mask.padding;
  const int64_t element = unit.batch * padding.batch_stride + unit.position_of(row) * padding.query_stride + key * padding.key_stride;
  T* added = unit.scratch.padding_row;
  if (!unit.staged_padding.covers(element, key, count)) {
    const T filter = static_cast<T>(padding.filter);
    int64_t spoken_of = 0;  // the keys behind are not kept
    if (padding.kind == Padding::Kind::lengths) {
      const int64_t at = unit.batch * padding.batch_stride;
      const int64_t length =
          padding.dtype == DType::i64 ? static_cast<const int64_t*>(padding.data)[at] : static_cast<const int32_t*>(padding.data)[at];
      spoken_of = smaller(larger(larger(length, 0) - key, 0), count);  // a length may be any 64-bit number
      for (int64_t j = 0; j < spoken_of; ++j) added[j] = 0;
    } else {
      spoken_of = smaller(larger(padding.columns - key, 0), count);
      switch (padding.dtype) {
        case DType::boolean:
          stage_padding(static_cast<const uint8_t*>(padding.data) + element, padding.key_stride, spoken_of, filter, added);
          break;
        case DType::i64:
          stage_padding(static_cast<const int64_t*>(padding.data) + element, padding.key_stride, spoken_of, filter, added);
          break;
        default: stage_padding(static_cast<const int32_t*>(padding.data) + element, padding.key_stride, spoken_of, filter, added);
      }
    }
    for (int64_t j = spoken_of; j < count; ++j) added[j] = filter;
  }
  constexpr int L = kLanes<T>;
  int64_t j = 0;
  for (; j + L <= count; j += L) store(scores + j, load(scores + j) + load(added + j));
  for (; j < count; ++j) scores[j] += added[j];
}

// First cell of the score output that belongs to (row, key).
template <class T>
static int64_t score_cell(const Unit<T>& unit, int64_t row, int64_t key) {
  const Problem& problem = unit.problem;
  return ((unit.batch * problem.q_heads + unit.head_of(row)) * problem.q_len + unit.position_of(row)) * problem.kv_len + key;
}

template <class T>
static void write_scores(const Unit<T>& unit, int64_t row, int64_t key, int64_t count, const T* scores) {
  store_row_any<T>(unit.problem.dtype, scores, count, unit.problem.scores, score_cell(unit, row, key));
}

// The cells of a row that were never computed, because no row of the unit sees their keys.
template <class T>
static void fill_unseen_scores(Unit<T>& unit) {
  const T value = unit.problem.score_mode == ScoreMode::weights ? T(0) : kMinusInfinity<T>;
  T* fill = unit.scratch.mask_row;
  for (int64_t j = 0; j < kKeyTile; ++j) fill[j] = value;
  unit.staged_mask = {};
  const KeyRange sides[2] = {{unit.answers.begin, smaller(unit.keys.begin, unit.answers.end)},
                             {larger(unit.keys.end, unit.answers.begin), unit.answers.end}};
  for (int64_t row = 0; row < unit.row_count; ++row) {
    for (const KeyRange& side : sides) {
      for (int64_t key = side.begin; key < side.end; key += kKeyTile) write_scores(unit, row, key, smaller(kKeyTile, side.end - key), fill);
    }
  }
}

// Softcap, mask, bias and padding on cells [from, to) of one row of a tile, whose keys start at `key`. Writes the score output of
// every mode but `weights` on the way. The limits of the row are the caller's, since most tiles have none.
template <class T>
static void transform_row(Unit<T>& unit, int64_t row, int64_t key, int64_t from, int64_t to, T* scores) {
  const Problem& problem = unit.problem;
  const Mask& mask = problem.mask;
  const ScoreMode mode = problem.score_mode;
  const int64_t begin = from / kLanes<T> * kLanes<T>, end = (to + kLanes<T> - 1) / kLanes<T> * kLanes<T>;

  if (mode == ScoreMode::raw) write_scores(unit, row, key + from, to - from, scores + from);
  if (problem.softcap != 0) cap_row<T>(scores, begin, end, problem.softcap);
  if (mode == ScoreMode::capped) write_scores(unit, row, key + from, to - from, scores + from);

  if (mask.tensor.kind != TensorMask::Kind::none) {
    const int64_t masked = smaller(to, mask.tensor.columns - key);
    if (masked > from) mask_row_any(unit, row, key + from, masked - from, scores + from);
  }

  // com.microsoft writes its logits with causality as a finite fill that takes the place of the padding filter.
  const bool fills_causal = mode == ScoreMode::mha_logits && mask.right >= 0;
  int64_t open = to;
  if (fills_causal) open = smaller(larger(unit.position_of(row) + unit.position.offset + mask.right + 1 - key, from), to);
  if (mask.padding.kind != Padding::Kind::none && open > from) pad_row(unit, row, key + from, open - from, scores + from);
  if (mode != ScoreMode::masked && mode != ScoreMode::mha_logits) return;

  KeyRange seen = unit.visible(row, row + 1);
  if (fills_causal) {
    for (int64_t j = open; j < to; ++j) scores[j] -= static_cast<T>(__FLT_MAX__);
    seen.end = unit.keys.end;
  }
  limit_row<T>(scores, begin, end, seen.begin - key, smaller(seen.end - key, to));
  write_scores(unit, row, key + from, to - from, scores + from);
}

template <class T, class Storage>
static bool excludes_row(const Storage* mask, int64_t count) {
  constexpr int L = kLanes<T>;
  const auto excluded = [](Storage value) {
    if constexpr (sizeof(Storage) == 1)
      return value == 0;
    else
      return to<T>(value) == kMinusInfinity<T>;
  };
  if (!excluded(mask[0])) return false;
  int64_t j = 0;
  Integers<T> counts{};
  for (; j + L <= count; j += L) {
    if constexpr (sizeof(Storage) == 1)
      counts |= load_bytes<T>(mask + j);
    else
      counts |= load_as<T>(mask + j) != splat<T>(kMinusInfinity<T>);
  }
  typename IntegerOf<T>::type any = 0;
  for (int i = 0; i < L; ++i) any |= counts[i];
  for (; j < count; ++j) any |= !excluded(mask[j]);
  return any == 0;
}

// Whether a tensor mask excludes every cell of a rectangle, so that block-sparse masks cost what they keep. Ends at the first
// cell that counts: dense masks pay next to nothing.
template <class T>
static bool excludes_all(const Unit<T>& unit, int64_t first, int64_t count, int64_t key, int64_t keys) {
  const TensorMask& mask = unit.problem.mask.tensor;
  if (mask.kind == TensorMask::Kind::none || mask.key_stride != 1) return false;
  for (int64_t row = first; row < first + count; ++row) {
    const int64_t element = mask_element(unit, row, key);
    bool excluded;
    switch (mask.dtype) {
      case DType::boolean: excluded = excludes_row<T>(static_cast<const uint8_t*>(mask.data) + element, keys); break;
      case DType::f32: excluded = excludes_row<T>(static_cast<const float*>(mask.data) + element, keys); break;
      case DType::f16: excluded = excludes_row<T>(static_cast<const Float16*>(mask.data) + element, keys); break;
      case DType::bf16: excluded = excludes_row<T>(static_cast<const BFloat16*>(mask.data) + element, keys); break;
      default: excluded = false;
    }
    if (!excluded) return false;
  }
  return true;
}
