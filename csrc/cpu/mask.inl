// mask.inl: everything between a product and its exponential: softcap, tensor masks, padding, limits, and the score output.

// Score cells outside [begin, end) become -infinity; [from, to) are the cells at hand, whole vectors.
template <class T>
static void limit_row(T* scores, int64_t from, int64_t to, int64_t begin, int64_t end) {
  constexpr int L = kLanes<T>;
  using Index = typename IntegerOf<T>::type;
  Integers<T> lane;
  for (int i = 0; i < L; ++i) lane[i] = i;
  for (int64_t j = from; j < to; j += L) {
    if (j >= begin && j + L <= end) continue;
    const Integers<T> index = lane + static_cast<Index>(j);
    const Integers<T> inside = (index >= static_cast<Index>(larger(begin, from))) & (index < static_cast<Index>(larger(smaller(end, to), from)));
    store(scores + j, select<T>(inside, load(scores + j), splat<T>(kMinusInfinity<T>)));
  }
}

template <class T>
static void cap_row(T* scores, int64_t from, int64_t to, double softcap) {
  const T cap = static_cast<T>(softcap), inverse = static_cast<T>(1 / softcap);
  for (int64_t j = from; j < to; j += kLanes<T>) store(scores + j, tanh<T>(load(scores + j) * inverse) * cap);
}

template <class T>
static void keep_row(const uint8_t* keep, int64_t count, T* scores) {
  constexpr int L = kLanes<T>;
  int64_t j = 0;
  for (; j + L <= count; j += L) {
    const Integers<T> kept = __builtin_convertvector(load_bits<Pack<uint8_t, L>>(keep + j), Integers<T>) != 0;
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
template <class T>
static T mask_value(const TensorMask& mask, int64_t element) {
  switch (mask.dtype) {
    case DType::boolean: return static_cast<const uint8_t*>(mask.data)[element] ? T(0) : kMinusInfinity<T>;
    case DType::f32: return to<T>(static_cast<const float*>(mask.data)[element]);
    case DType::f16: return to<T>(static_cast<const Float16*>(mask.data)[element]);
    case DType::bf16: return to<T>(static_cast<const BFloat16*>(mask.data)[element]);
    default: break;
  }
  const double value = static_cast<const double*>(mask.data)[element];
  if constexpr (sizeof(T) == 4) {
    const bool finite = value - value == 0;
    if (finite && value < -__FLT_MAX__) return -__FLT_MAX__;
    if (finite && value > __FLT_MAX__) return __FLT_MAX__;
  }
  return static_cast<T>(value);
}

template <class T>
static int64_t mask_element(const Unit<T>& unit, int64_t row, int64_t key) {
  const TensorMask& mask = unit.problem.mask.tensor;
  return unit.batch * mask.batch_stride + unit.head_of(row) * mask.head_stride + unit.position_of(row) * mask.query_stride +
         key * mask.key_stride;
}

// Adds or selects by the tensor mask on `count` cells from `key` on.
template <class T>
static void mask_row(Unit<T>& unit, int64_t row, int64_t key, int64_t count, T* scores) {
  const TensorMask& mask = unit.problem.mask.tensor;
  const int64_t element = mask_element(unit, row, key);
  const bool contiguous = mask.key_stride == 1 && !(mask.dtype == DType::f64 && sizeof(T) == 4);
  if (!contiguous) {
    // Rows that share their mask, by broadcasting, come one after the other.
    if (unit.staged_mask != element || mask.key_stride == 0) {
      for (int64_t j = 0; j < count; ++j) unit.scratch.mask_row[j] = mask_value<T>(mask, element + j * mask.key_stride);
      unit.staged_mask = element;
    }
    return bias_row<T, T>(unit.scratch.mask_row, count, scores);
  }
  switch (mask.dtype) {
    case DType::boolean: return keep_row<T>(static_cast<const uint8_t*>(mask.data) + element, count, scores);
    case DType::f32: return bias_row<T>(static_cast<const float*>(mask.data) + element, count, scores);
    case DType::f16: return bias_row<T>(static_cast<const Float16*>(mask.data) + element, count, scores);
    case DType::bf16: return bias_row<T>(static_cast<const BFloat16*>(mask.data) + element, count, scores);
    default: return bias_row<T>(static_cast<const double*>(mask.data) + element, count, scores);
  }
}
