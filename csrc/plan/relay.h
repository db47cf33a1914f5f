// Between two hops: what a relay passes on. Records came over the rail, one a token and domain; they leave inside the
// domain, one a token and rank.
#pragma once
#include <cstdint>

#include "plan/records.h"
#include "plan/send_order.h"

namespace flexep {

struct RelayRecords {
  static constexpr int kPhases = 2;

  const int32_t* rail;  // [order.rows, width] records of the rail's shape
  RecordShape rail_shape;
  const int32_t* used;  // [1] how many have come

  int32_t* token;      // out [order.rows] token of each; -1 tail
  SendOrder order;     // of the members of the domain
  Records records;     // inside the domain
  int32_t* workspace;  // workspace_ints(blocks)

  FLEXEP_HD int64_t items() const { return static_cast<int64_t>(order.rows) * order.top_k; }
  FLEXEP_HD int64_t workspace_ints(int blocks) const { return static_cast<int64_t>(blocks) * order.owners; }
  FLEXEP_HD int64_t shared_ints(int warps, int lanes) const {
    const int64_t number = SendOrder::numbering_ints(order.owners, warps),
                  place = SendOrder::placing_ints(order.owners, lanes);
    return number > place ? number : place;
  }

  template <int kPhase, class Team>
  FLEXEP_HD void phase(const Team& team, int32_t* shared) const {
    const auto members = [this](int q) { return record(q) + rail_shape.member(0); };
    if constexpr (kPhase == 0) {
      const int32_t here = *used;
      for (int64_t q = grid_rank(team); q < order.rows; q += grid_size(team))
        token[q] = q < here ? record(static_cast<int>(q))[0] : -1;
      const auto read = [&](int64_t, int q, int k) {
        const int member = q < here ? members(q)[k] : -1;
        return member < order.owners ? member : -1;  // what never arrived may say anything
      };
      order.number(team, workspace, shared, read, [](int member, int64_t) { return member; }, members);
    } else {
      const auto slots = [&](int q) {
        return TokenSlots{record(q)[0], members(q), record(q) + rail_shape.row(0),
                          record(q) + rail_shape.weight(0)};
      };
      order.place(team, workspace, shared, slots, records);
    }
  }

 private:
  FLEXEP_HD const int32_t* record(int q) const { return rail + static_cast<int64_t>(q) * rail_shape.width(); }
};

}  // namespace flexep
