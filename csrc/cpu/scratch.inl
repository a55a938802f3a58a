// scratch.inl: what one thread works in, laid out in one piece of memory.

// The parts of one thread's scratch, each 64-byte aligned. T is the compute type.
template <class T>
struct Scratch {
  T* queries;          // [row_block][padded_head], scaled
  T* keys;             // one tile of K: packed for the tile product, or as rows for dot products
  T* values;           // [kKeyTile][padded_v_head]
  T* scores;           // [kSubBlock][kKeyTile]
  T* sums;             // [row_block][padded_v_head], unnormalised output
  T* row_max;          // [row_block]
  T* row_sum;          // [row_block][kPad], one partial sum for each lane
  T* row_base;         // [kSubBlock] what is subtracted before exp
  T* row_factor;       // [kSubBlock] what rescales the sums of earlier tiles
  T* key_bias;         // [padded_head]
  T* value_bias;       // [padded_v_head]
  T* mask_row;         // [kKeyTile], additive
  T* padding_row;      // [kKeyTile], additive
  int64_t* row_heads;  // [row_block] query head and position of each row: dividing by the group again and again would show
  int64_t* row_positions;
  const void** key_rows;  // [kKeyTile] addresses of a tile's rows
  const void** value_rows;
  const void** next_key_rows;  // of the tile after it

  // Lays the parts out from `base` and returns the bytes they take; with a null base it only measures.
  size_t lay_out(const Blocking& blocking, char* base) {
    size_t used = 0;
    const auto take = [&](auto*& part, int64_t count) {
      part = base ? reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + used) : nullptr;
      used += (static_cast<size_t>(count) * sizeof(*part) + 63) / 64 * 64;
    };
    take(queries, blocking.row_block * blocking.padded_head);
    take(keys, kKeyTile * blocking.padded_head);
    take(values, kKeyTile * blocking.padded_v_head);
    take(scores, kSubBlock * kKeyTile);
    take(sums, blocking.row_block * blocking.padded_v_head);
    take(row_max, blocking.row_block + kPad);
    take(row_sum, blocking.row_block * kPad);
    take(row_base, kSubBlock + kPad);
    take(row_factor, kSubBlock + kPad);
    take(key_bias, blocking.padded_head);
    take(value_bias, blocking.padded_v_head);
    take(mask_row, kKeyTile);
    take(padding_row, kKeyTile);
    take(row_heads, blocking.row_block);
    take(row_positions, blocking.row_block);
    take(key_rows, kKeyTile);
    take(value_rows, kKeyTile);
    take(next_key_rows, kKeyTile);
    return used;
  }
};

template <class T>
static size_t scratch_bytes(const Blocking& blocking) {
  return Scratch<T>{}.lay_out(blocking, nullptr);
}
