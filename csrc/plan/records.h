// What travels ahead of a token: int32 { token at its source, row of each slot or -1 [, index in the domain of each
// slot's rank or -1, over a rail] [, weight of each slot as fp32 bits] }. Slots that go elsewhere are -1, their weights 0.
#pragma once
#include <cstdint>

#include "plan/block.h"

namespace flexep {

struct RecordShape {
  int top_k;
  bool over_rail, has_weights;

  FLEXEP_HD int width() const { return weight(0) + (has_weights ? top_k : 0); }
  FLEXEP_HD int row(int k) const { return 1 + k; }
  FLEXEP_HD int member(int k) const { return 1 + top_k + k; }
  FLEXEP_HD int weight(int k) const { return 1 + top_k * (over_rail ? 2 : 1) + k; }
};

/// A token and its slots, [top_k] each: what they have come for, their rows, and their weights, if these travel.
struct TokenSlots {
  int32_t token;
  const int32_t *ids, *rows, *weights;
};

/// One slot of a token.
struct TokenSlot {
  int32_t token = 0, id = -1, row = -1, weight = 0;
};

/// Where records are written; no memory: none are.
struct Records {
  RecordShape shape;
  int32_t* meta;  // out [num_send, width]

  /// By one lane: the slots with an id in [first, first + unit) go into the record.
  FLEXEP_HD void write(int64_t position, const TokenSlots& slots, int first, int unit) const {
    if (!meta) return;
    int32_t* const record = meta + position * shape.width();
    const auto if_here = [&](int k, int32_t value, int32_t otherwise) {
      return is_in(slots.ids[k], first, unit) ? value : otherwise;
    };
    record[0] = slots.token;
    const auto fill = [&](int at, const auto& value) {
      FLEXEP_INDEPENDENT
      for (int k = 0; k < shape.top_k; ++k) record[at + k] = value(k);
    };
    fill(shape.row(0), [=](int k) { return if_here(k, slots.rows[k], -1); });
    if (shape.over_rail) fill(shape.member(0), [=](int k) { return if_here(k, slots.ids[k] - first, -1); });
    if (shape.has_weights) fill(shape.weight(0), [=](int k) { return if_here(k, slots.weights[k], 0); });
  }

  /// By a lane for each slot of the token: its slot `k` goes into the record at `position`, as if it were empty where its
  /// id is not in [first, first + unit).
  FLEXEP_HD void write_slot(int64_t position, const TokenSlot& slot, int k, int first, int unit) const {
    if (!meta) return;
    int32_t* const record = meta + position * shape.width();
    const bool here = is_in(slot.id, first, unit);
    if (k == 0) record[0] = slot.token;
    record[shape.row(k)] = here ? slot.row : -1;
    if (shape.over_rail) record[shape.member(k)] = here ? slot.id - first : -1;
    if (shape.has_weights) record[shape.weight(k)] = here ? slot.weight : 0;
  }

  FLEXEP_HD void clear(int64_t position) const {
    if (!meta) return;
    int32_t* const record = meta + position * shape.width();
    FLEXEP_ROLLED
    for (int i = 0; i < shape.width(); ++i) record[i] = i < shape.weight(0) ? -1 : 0;
  }

 private:
  FLEXEP_HD static bool is_in(int id, int first, int unit) {
    return static_cast<uint32_t>(id - first) < static_cast<uint32_t>(unit);
  }
};

}  // namespace flexep
