// Where experts live: place -> (rank, local expert). Places are numbered rank-major, so the local expert of a
// place is its distance from its rank's first place. Replicated experts would only make this table longer.
#pragma once
#include <cstdint>

#include "base/hd.h"

namespace flexep {

struct TableView {
  int experts, ranks;
  const int32_t* place_of_expert;  // [experts]
  const int32_t* rank_of_place;    // [experts]
  const int32_t* rank_begin;       // [ranks + 1] first place of each rank

  /// Place of an expert id, or -1 for an empty slot. Ids outside [0, experts) count as empty: the caller has
  /// refused or counted them, and a plan must never read outside its tables.
  FLEXEP_HD int place(int32_t expert) const {
    return expert >= 0 && expert < experts ? place_of_expert[expert] : -1;
  }
};

}  // namespace flexep
