// unit.inl: one unit of work, a block of rows of one kv head over one range of keys, and the packing of its operands.

// What a row of additive values was made from: mask element, key and number of keys.
struct Staged {
  int64_t element = -1, key = -1, count = 0;
  // True when the row can be used; otherwise it must be made again, which is noted here.
  bool covers(int64_t new_element, int64_t new_key, int64_t new_count) {
    if (element == new_element && key == new_key && count >= new_count) return true;
    element = new_element, key = new_key, count = new_count;
    return false;
  }
};

template <class T>
struct Unit {
  const Problem& problem;
  const Blocking& blocking;
  Scratch<T> scratch;

  int64_t batch = 0, kv_head = 0, split = 0;
  int64_t first_row = 0, row_count = 0;
  RowPosition position;
  KeyRange answers;             // keys that this unit speaks for: all, or one split
  KeyRange keys;                // keys whose scores it computes
  const T* key_bias = nullptr;  // added as K and V are read
  const T* value_bias = nullptr;
  bool direct_keys = false;  // K and V are read in place
  bool direct_values = false;
  bool transforms = false;  // scores need more than the limits of their row

  const T* values = nullptr;  // the V rows of the tile at hand
  int64_t value_stride = 0;
  int64_t next_key = -1;  // first key and length of the tile that next_key_rows points at
  int64_t next_count = 0;
  Staged staged_mask;  // what mask_row and padding_row hold
  Staged staged_padding;

  Unit(const Problem& p, const Blocking& b) : problem(p), blocking(b) {}

  int64_t head_of(int64_t row) const { return scratch.row_heads[row]; }
  int64_t position_of(int64_t row) const { return scratch.row_positions[row]; }
  // Keys that rows [begin, end) of the unit see, all of them together.
  KeyRange visible(int64_t begin, int64_t end) const {
    return visible_keys(problem.mask, position, position_of(begin), position_of(end - 1) + 1);
  }
  // Keys that each of them sees: limits grow with the position, so the last row begins last and the first ends first.
  KeyRange common(int64_t begin, int64_t end) const { return {visible(end - 1, end).begin, visible(begin, begin + 1).end}; }
};

template <class T>
constexpr DType kComputeDType = sizeof(T) == 4 ? DType::f32 : DType::f64;

ONNX_ATTN_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ONNX_ATTN_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
ONNX_ATTN_INLINE bool contains(KeyRange range, int64_t begin, int64_t end) { return range.begin <= begin && end <= range.end; }
ONNX_ATTN_INLINE KeyRange intersect(KeyRange a, KeyRange b) {
  const KeyRange both{larger(a.begin, b.begin), smaller(a.end, b.end)};
  return both.begin < both.end ? both : KeyRange{both.begin, both.begin};
}

// Decides which keys the unit computes and how it reads K and V.
template <class T>
static void open_unit(Unit<T>& unit, int64_t index) {
  const Problem& problem = unit.problem;
  const Blocking& blocking = unit.blocking;
  // Later rows first: under causality they are the longer work, and threads should end on short units.
  const int64_t block = blocking.row_blocks - 1 - index % blocking.row_blocks;
  index /= blocking.row_blocks;
  unit.split = index % blocking.key_splits;
  index /= blocking.key_splits;
  unit.kv_head = index % problem.kv_heads;
  unit.batch = index / problem.kv_heads;
  unit.first_row = block * blocking.row_block;
  unit.row_count = smaller(blocking.row_block, blocking.rows - unit.first_row);
  for (int64_t i = 0; i < unit.row_count; ++i) {
    unit.scratch.row_heads[i] = unit.kv_head * blocking.group + (unit.first_row + i) % blocking.group;
    unit.scratch.row_positions[i] = (unit.first_row + i) / blocking.group;
  }

  unit.position = row_position(problem.mask, unit.batch, problem.q_len, problem.kv_len);
  unit.answers = {0, problem.kv_len};
  if (blocking.key_splits > 1) unit.answers = intersect({unit.split * kSplitKeys, (unit.split + 1) * kSplitKeys}, unit.answers);
  switch (problem.score_mode) {
    case ScoreMode::raw:
    case ScoreMode::capped: unit.keys = unit.answers; break;
    case ScoreMode::mha_logits: {
      Mask without_window = problem.mask;
      without_window.left = without_window.right = -1;
      unit.keys = intersect(unit.answers, visible_keys(without_window, unit.position, 0, problem.q_len));
      break;
    }
    default: unit.keys = intersect(unit.answers, unit.visible(0, unit.row_count));
  }

  constexpr int L = kLanes<T>;
  const bool biased = !problem.append.active;
  if (blocking.few_rows) {
    unit.direct_keys = reads_in_place<T>(problem.dtype) && !(biased && problem.k_bias) && problem.head_size % L == 0;
    unit.direct_values = reads_in_place<T>(problem.v_dtype) && !(biased && problem.v_bias) && problem.v_head_size % L == 0;
  } else {
    // V is read many times: only compact rows stay in the first-level cache, where strides of large powers of two collide.
    unit.direct_values = problem.v_dtype == kComputeDType<T> && !(biased && problem.v_bias) && !problem.beams.index &&
                         problem.v_head_size % L == 0 && problem.v.row_stride <= 2 * problem.v_head_size;
  }
  unit.transforms = problem.softcap != 0 || problem.mask.tensor.kind != TensorMask::Kind::none ||
                    problem.mask.padding.kind != Padding::Kind::none || problem.score_mode != ScoreMode::none;
}

// One head's projection bias as compute values, or null.
template <class T>
static const T* read_bias(const Problem& problem, const void* bias, int64_t head, int64_t size, int64_t padded, T* target) {
  if (!bias) return nullptr;
  const void* row = static_cast<const char*>(bias) + head * size * element_bytes(problem.dtype);
  pack_rows_any<T>(problem.dtype, &row, 1, size, nullptr, padded, target);
  return target;
}

// Q rows, biased and scaled once here instead of once for each score.
template <class T>
static void pack_queries(Unit<T>& unit) {
  const Problem& problem = unit.problem;
  const int64_t padded = unit.blocking.padded_head;
  for (int64_t i = 0; i < unit.row_count; ++i) {
    const int64_t head = unit.head_of(i);
    const int64_t offset = unit.batch * problem.q.batch_stride + head * problem.q.head_stride + unit.position_of(i) * problem.q.row_stride;
    const void* row = static_cast<const char*>(problem.q.data) + offset * element_bytes(problem.dtype);
    const T* bias = read_bias<T>(problem, problem.q_bias, head, problem.head_size, padded, unit.scratch.keys);  // free until K comes
    T* target = unit.scratch.queries + i * padded;
    pack_rows_any<T>(problem.dtype, &row, 1, problem.head_size, bias, padded, target);
    const T scale = static_cast<T>(problem.scale);
    for (int64_t d = 0; d < padded; d += kLanes<T>) store(target + d, load(target + d) * scale);
  }
}

// Addresses of `count` rows of K or V from `key` on; a beam search takes each from the cache of its own entry.
template <class T>
static void point_at_rows(const Unit<T>& unit, const Tensor4& tensor, DType dtype, int64_t key, int64_t count, const void** rows) {
  const Beams& beams = unit.problem.beams;
  const int64_t size = element_bytes(dtype);
  const char* head = static_cast<const char*>(tensor.data) + unit.kv_head * tensor.head_stride * size;
  const char* own = head + (unit.batch * tensor.batch_stride + key * tensor.row_stride) * size;
  for (int64_t i = 0; i < count; ++i) rows[i] = own + i * tensor.row_stride * size;
  if (!beams.index) return;
  const int64_t indirect = smaller(beams.past.at(unit.batch, unit.problem.kv_len) - key, count);
  for (int64_t i = 0; i < indirect; ++i) {
    const int64_t beam = beams.index[unit.batch * beams.batch_stride + key + i];
    const int64_t entry = unit.batch / beams.width * beams.width + smaller(larger(beam, 0), beams.width - 1);
    rows[i] = head + (entry * tensor.batch_stride + (key + i) * tensor.row_stride) * size;
  }
}

// Brings a tile of keys into the form that scores are computed from, and says which keys come next.
template <class T>
static void open_key_tile(Unit<T>& unit, int64_t key, int64_t count) {
  const Problem& problem = unit.problem;
  Scratch<T>& scratch = unit.scratch;
  if (!unit.blocking.few_rows) {
    point_at_rows(unit, problem.k, problem.dtype, key, count, scratch.key_rows);
    return pack_transposed_any<T>(problem.dtype, scratch.key_rows, count, problem.head_size, unit.key_bias, scratch.keys);
  }
  if (unit.next_key == key) {
    const void** rows = scratch.key_rows;
    scratch.key_rows = scratch.next_key_rows, scratch.next_key_rows = rows;
  } else {
    point_at_rows(unit, problem.k, problem.dtype, key, count, scratch.key_rows);
  }
  unit.next_key = key + count;
  unit.next_count = smaller(kKeyTile, unit.keys.end - unit.next_key);
  point_at_rows(unit, problem.k, problem.dtype, unit.next_key, unit.next_count, scratch.next_key_rows);
  if (unit.direct_keys) return;
  const int64_t padded = unit.blocking.padded_head;
  pack_rows_any<T>(problem.dtype, scratch.key_rows, count, problem.head_size, unit.key_bias, padded, scratch.keys);
  for (int64_t i = 0; i < count; ++i) scratch.key_rows[i] = scratch.keys + i * padded;
}

// The same for V, as rows of compute values: in place, or in scratch.
template <class T>
static void open_value_tile(Unit<T>& unit, int64_t key, int64_t count) {
  const Problem& problem = unit.problem;
  Scratch<T>& scratch = unit.scratch;
  if (unit.direct_values && !unit.blocking.few_rows) {
    unit.value_stride = problem.v.row_stride;
    unit.values = static_cast<const T*>(problem.v.data) + unit.batch * problem.v.batch_stride + unit.kv_head * problem.v.head_stride +
                  key * problem.v.row_stride;
    return;
  }
  point_at_rows(unit, problem.v, problem.v_dtype, key, count, scratch.value_rows);
  if (unit.direct_values) return;
  const int64_t padded = unit.blocking.padded_v_head;
  pack_rows_any<T>(problem.v_dtype, scratch.value_rows, count, problem.v_head_size, unit.value_bias, padded, scratch.values);
  unit.values = scratch.values;
  unit.value_stride = padded;
  for (int64_t i = 0; i < count; ++i) scratch.value_rows[i] = scratch.values + i * padded;
}
