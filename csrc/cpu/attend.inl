// attend.inl: blocked attention with a running softmax: the tiles of one unit, and the joining of split keys.

// scores[i][from ... to) of `count` rows from `first` on, transformed and limited; lanes around them hold -infinity.
template <class T>
static void score_tile(Unit<T>& unit, int64_t first, int64_t count, int64_t key, int64_t from, int64_t to) {
  constexpr int L = kLanes<T>;
  const Scratch<T>& scratch = unit.scratch;
  const int64_t padded = unit.blocking.padded_head, depth = unit.problem.head_size;
  const T* queries = scratch.queries + first * padded;
  const int64_t begin = from / L, end = (to + L - 1) / L;  // in vectors
  if (unit.blocking.few_rows) {
    const Ahead values{scratch.value_rows + from, unit.direct_values ? unit.problem.v_head_size * element_bytes(unit.problem.v_dtype) : 0};
    dot_products_any<T>(unit.direct_keys ? unit.problem.dtype : kComputeDType<T>, queries, padded, count, scratch.key_rows + from,
                        to - from, unit.direct_keys ? depth : padded, scratch.scores + from, values);
  } else {
    for (int64_t v = begin; v < end;) {
      const int64_t panel = v / kPanelVectors, next = smaller((panel + 1) * kPanelVectors, end);
      const T* columns = scratch.keys + panel * kPanelVectors * L * depth + v % kPanelVectors * L;
      multiply<T, false>(queries, padded, count, columns, kPanelVectors * L, depth, scratch.scores + v * L, kKeyTile,
                         static_cast<int>(next - v), scratch.row_factor);
      v = next;
    }
  }

  if (unit.transforms) {
    for (int64_t i = 0; i < count; ++i) transform_row(unit, first + i, key, from, to, scratch.scores + i * kKeyTile);
  }
  if (from == begin * L && to == end * L && contains(unit.common(first, first + count), key + from, key + to)) return;
  for (int64_t i = 0; i < count; ++i) {
    const KeyRange seen = unit.visible(first + i, first + i + 1);
    limit_row<T>(scratch.scores + i * kKeyTile, begin * L, end * L, larger(seen.begin - key, from), smaller(seen.end - key, to));
  }
}

// Scores become weights relative to the running maximum; row_factor says by what the earlier sums must shrink.
template <class T>
static void soften(Unit<T>& unit, int64_t first, int64_t count, int64_t from, int64_t to) {
  constexpr int L = kLanes<T>;
  const Scratch<T>& scratch = unit.scratch;
  for (int64_t i = 0; i < count; ++i) {
    const T* row = scratch.scores + i * kKeyTile;
    Vector<T> largest = load(row + from);
    for (int64_t j = from + L; j < to; j += L) largest = maximum<T>(load(row + j), largest);
    scratch.row_base[i] = reduce_max<T>(largest);
  }
  for (int64_t i = 0; i < count; i += L) {
    const Vector<T> before = load(scratch.row_max + first + i);
    const Vector<T> after = maximum<T>(load(scratch.row_base + i), before);
    // A row without a score yet keeps its maximum at -infinity, and -infinity - -infinity would be NaN.
    const Vector<T> base = select<T>(after == splat<T>(kMinusInfinity<T>), Vector<T>{}, after);
    store(scratch.row_max + first + i, after);
    store(scratch.row_base + i, base);
    store(scratch.row_factor + i, exp_of_nonpositive<T>(before - base));
  }
  for (int64_t i = 0; i < count; ++i) {
    T* row = scratch.scores + i * kKeyTile;
    T* sum = scratch.row_sum + (first + i) * kPad;
    const T base = scratch.row_base[i];
    Vector<T> total = load(sum) * scratch.row_factor[i];
    for (int64_t j = from; j < to; j += L) {
      const Vector<T> weight = exp_of_nonpositive<T>(load(row + j) - base);
      total += weight;
      store(row + j, weight);
    }
    store(sum, total);
  }
}

// One tile of keys for one sub-block of rows.
template <class T>
static void attend_tile(Unit<T>& unit, int64_t first, int64_t count, int64_t key, int64_t keys) {
  constexpr int L = kLanes<T>;
  const KeyRange tile{key, key + keys};
  const KeyRange seen = intersect(tile, unit.visible(first, first + count));
  const bool writes_scores = unit.problem.score_mode != ScoreMode::none && unit.problem.score_mode != ScoreMode::weights;
  const KeyRange scored = writes_scores ? tile : seen;
  if (scored.begin >= scored.end) return;
  prefetch_mask(unit, first, count, seen.begin, seen.end - seen.begin);
  if (!writes_scores && excludes_all(unit, first, count, seen.begin, seen.end - seen.begin)) return;

  score_tile(unit, first, count, key, scored.begin - key, scored.end - key);
  if (seen.begin >= seen.end) return;
  const int64_t from = seen.begin - key, to = seen.end - key;
  soften(unit, first, count, from / L * L, (to + L - 1) / L * L);
  // V is read for keys in sight only: behind the length it may hold NaN, and 0 * NaN is NaN.
  const Scratch<T>& scratch = unit.scratch;
  const int64_t padded = unit.blocking.padded_v_head;
  const int64_t width = unit.direct_values ? unit.problem.v_head_size : padded;
  const T* weights = scratch.scores + from;
  T* sums = scratch.sums + first * padded;
  if (unit.blocking.few_rows) {
    const int64_t key_bytes = unit.next_count >= to - from ? unit.problem.head_size * element_bytes(unit.problem.dtype) : 0;
    weighted_sums_any<T>(unit.direct_values ? unit.problem.v_dtype : kComputeDType<T>, weights, count, scratch.value_rows + from, to - from,
                         width, sums, padded, scratch.row_factor, {scratch.next_key_rows, key_bytes});
  } else {
    multiply<T, true>(weights, kKeyTile, count, unit.values + from * unit.value_stride, unit.value_stride, to - from, sums, padded,
                      static_cast<int>(width / L), scratch.row_factor);
  }
}

// The weights output needs final maxima and sums, so scores are computed a second time.
template <class T>
static void write_weights(Unit<T>& unit) {
  constexpr int L = kLanes<T>;
  const Scratch<T>& scratch = unit.scratch;
  for (int64_t key = unit.keys.begin; key < unit.keys.end; key += kKeyTile) {
    const int64_t keys = smaller(kKeyTile, unit.keys.end - key);
    open_key_tile(unit, key, keys);
    for (int64_t first = 0; first < unit.row_count; first += kSubBlock) {
      const int64_t count = smaller(kSubBlock, unit.row_count - first);
      score_tile(unit, first, count, key, 0, keys);
      for (int64_t i = 0; i < count; ++i) {
        T* row = scratch.scores + i * kKeyTile;
        const T top = scratch.row_max[first + i], base = top == kMinusInfinity<T> ? T(0) : top;
        const T sum = reduce_add<T>(load(scratch.row_sum + (first + i) * kPad));
        const T divisor = sum == 0 ? T(1) : sum;
        for (int64_t j = 0; j < keys; j += L) store(row + j, exp_of_nonpositive<T>(load(row + j) - base) / divisor);
        write_scores(unit, first + i, key, keys, row);
      }
    }
  }
}

// Y and log-sum-exp of one row, `row` counted within the kv head.
template <class T>
static void finish_row(const Problem& problem, const Blocking& blocking, int64_t batch, int64_t kv_head, int64_t row, T* sums, T top,
                       T sum) {
  const int64_t head = kv_head * blocking.group + row % blocking.group, position = row / blocking.group;
  for (int64_t d = 0; d < blocking.padded_v_head; d += kLanes<T>) {
    // No key, or none with a finite score: 0 even where V holds NaN, which weights of 0 would have let through.
    store(sums + d, sum == 0 ? Vector<T>{} : load(sums + d) / sum);
  }
  store_row_any<T>(problem.dtype, sums, problem.v_head_size, problem.y.data,
                   batch * problem.y.batch_stride + head * problem.y.head_stride + position * problem.y.row_stride);
  if (problem.lse) {
    const double log_sum = sum == 0 ? -__builtin_inf() : static_cast<double>(top) + __builtin_log(static_cast<double>(sum));
    problem.lse[(batch * problem.q_heads + head) * problem.q_len + position] = static_cast<float>(log_sum);
  }
}

// One row of a split's result: the sums of V, then the maximum and the sum of weights.
template <class T>
static T* partial_row(const Blocking& blocking, void* partials, int64_t head, int64_t split, int64_t row) {
  return static_cast<T*>(partials) + ((head * blocking.key_splits + split) * blocking.rows + row) * blocking.partial_row;
}

template <class T>
static void run_unit(const Problem& problem, const Blocking& blocking, int64_t index, char* memory, void* partials) {
  Unit<T> unit(problem, blocking);
  Scratch<T>& scratch = unit.scratch;
  scratch.lay_out(blocking, memory);
  open_unit(unit, index);
  pack_queries(unit);
  if (!problem.append.active) {
    unit.key_bias = read_bias<T>(problem, problem.k_bias, unit.kv_head, problem.head_size, blocking.padded_head, scratch.key_bias);
    unit.value_bias = read_bias<T>(problem, problem.v_bias, unit.kv_head, problem.v_head_size, blocking.padded_v_head, scratch.value_bias);
  }
  __builtin_memset(scratch.sums, 0, unit.row_count * blocking.padded_v_head * sizeof(T));
  __builtin_memset(scratch.row_sum, 0, unit.row_count * kPad * sizeof(T));
  for (int64_t i = 0; i < unit.row_count + kPad; ++i) scratch.row_max[i] = kMinusInfinity<T>;

  for (int64_t key = unit.keys.begin; key < unit.keys.end; key += kKeyTile) {
    const int64_t keys = smaller(kKeyTile, unit.keys.end - key);
    open_key_tile(unit, key, keys);
    open_value_tile(unit, key, keys);
    // A tile on the diagonal is cut finer, since each sub-block computes the keys that any of its rows sees.
    const int64_t step = contains(unit.common(0, unit.row_count), key, key + keys) ? kSubBlock : kEdgeBlock;
    for (int64_t first = 0; first < unit.row_count; first += step) {
      attend_tile(unit, first, smaller(step, unit.row_count - first), key, keys);
    }
  }

  if (problem.score_mode == ScoreMode::weights) write_weights(unit);
  if (problem.score_mode != ScoreMode::none) fill_unseen_scores(unit);
  for (int64_t i = 0; i < unit.row_count; ++i) {
    T* sums = scratch.sums + i * blocking.padded_v_head;
    const T sum = reduce_add<T>(load(scratch.row_sum + i * kPad));
    if (blocking.key_splits == 1) {
      finish_row<T>(problem, blocking, unit.batch, unit.kv_head, unit.first_row + i, sums, scratch.row_max[i], sum);
      continue;
    }
    T* partial = partial_row<T>(blocking, partials, unit.batch * problem.kv_heads + unit.kv_head, unit.split, i);
    __builtin_memcpy(partial, sums, blocking.padded_v_head * sizeof(T));
    partial[blocking.padded_v_head] = scratch.row_max[i];
    partial[blocking.padded_v_head + 1] = sum;
  }
}

// Joins the splits of one kv head in the order of their keys, in place of the first.
template <class T>
static void combine(const Problem& problem, const Blocking& blocking, int64_t head, void* partials) {
  const int64_t padded = blocking.padded_v_head;
  for (int64_t row = 0; row < blocking.rows; ++row) {
    T top = kMinusInfinity<T>;
    for (int64_t split = 0; split < blocking.key_splits; ++split) {
      const T other = partial_row<T>(blocking, partials, head, split, row)[padded];
      top = other > top ? other : top;
    }
    T* joined = partial_row<T>(blocking, partials, head, 0, row);
    T sum = 0;
    bool started = false;
    for (int64_t split = 0; split < blocking.key_splits; ++split) {
      const T* part = partial_row<T>(blocking, partials, head, split, row);
      const T part_top = part[padded], part_sum = part[padded + 1];
      if (part_sum == 0) continue;  // no key of this split counts
      // A split whose scores are NaN has no maximum but a NaN sum, which must spread.
      const T weight = part_top == kMinusInfinity<T> ? T(1) : exp_of_nonpositive<T>(splat<T>(part_top - top))[0];
      for (int64_t d = 0; d < padded; d += kLanes<T>) {
        const Vector<T> added = load(part + d) * weight;
        store(joined + d, started ? load(joined + d) + added : added);
      }
      sum += part_sum * weight;
      started = true;
    }
    finish_row<T>(problem, blocking, head / problem.kv_heads, head % problem.kv_heads, row, joined, top, sum);
  }
}
