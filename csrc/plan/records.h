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

/// Where records are written, one by one; no memory: none are.
struct Records {
  RecordShape shape;
  int32_t* meta;  // out [num_send, width]

  /// The slots of a token, top_k long: those with an id in [first, first + unit) go into the record.
  template <class Team>
  FLEXEP_HD void write(const Team& team, int64_t position, int32_t token, const int32_t* ids, int first,
                       int unit, const int32_t* rows, const int32_t* weights) const {
    if (!meta) return;
    int32_t* const record = meta + position * shape.width();
    const auto if_here = [=](int k, int32_t value, int32_t otherwise) {
      return static_cast<uint32_t>(ids[k] - first) < static_cast<uint32_t>(unit) ? value : otherwise;
    };
    record[0] = token;
    const auto fill = [&](int at, const auto& value) { each_slot(team, shape.top_k, record + at, value); };
    fill(shape.row(0), [=](int k) { return if_here(k, rows[k], -1); });
    if (shape.over_rail) fill(shape.member(0), [=](int k) { return if_here(k, ids[k] - first, -1); });
    if (shape.has_weights) fill(shape.weight(0), [=](int k) { return if_here(k, weights[k], 0); });
  }

  FLEXEP_HD void clear(int64_t position) const {
    if (!meta) return;
    int32_t* const record = meta + position * shape.width();
    for (int i = 0; i < shape.width(); ++i) record[i] = i < shape.weight(0) ? -1 : 0;
  }
};

}  // namespace flexep
