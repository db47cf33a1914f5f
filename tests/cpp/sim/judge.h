// What must have become of the ranks of a world, whatever the schedule.
#pragma once
#include <string>
#include <vector>

#include "scenarios.h"

namespace flexep::sim {

/// Names what is wrong with a fault record, or returns nothing. All records of a run tell of waits that failed first.
inline std::string judge_fault(const World& world, const FaultRecord& fault) {
  const Fate fate = world.scenario.fate;
  if (has_reached(fault.got, fault.want) != (fate == Fate::one_differs))
    return "got and want of a fault record";
  if (static_cast<int>(fault.epoch) != static_cast<int>(epoch_of(fault.want)) && fate != Fate::one_killed)
    return "epoch of a fault record";
  if (fault.awaited == fault.waiter) return "a rank waited for itself";
  const auto status = static_cast<Status>(fault.status);
  const bool by_deadline = fate == Fate::one_absent || fate == Fate::one_killed || fate == Fate::dies_telling;
  if (by_deadline && status != Status::expired) return "status of a fault record is not expired";
  if (fate == Fate::one_leaves && status != Status::left) return "status of a fault record is not left";
  if (fate == Fate::one_differs && status != Status::mismatched) return "status of a fault record";
  if (fate == Fate::one_killed) return "";  // any wait of any rank may have been the first
  if (fault.epoch != 3 || fault.word != static_cast<int>(Word::published)) return "word of a fault record";
  if ((fate == Fate::one_absent || fate == Fate::dies_telling) && fault.waiter != world.impatient_rank)
    return "waiter of a fault record";
  const bool other_side = fate == Fate::one_differs && fault.waiter == world.odd_rank;
  if (!other_side && fault.awaited != world.odd_rank) return "awaited of a fault record";
  return "";
}

/// Names what is wrong with how a world ended, or returns nothing.
inline std::string judge(const World& world, const std::vector<RankState>& ranks) {
  const Fate fate = world.scenario.fate;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const Ending& ending = ranks[rank].ending;
    const bool odd = rank == world.odd_rank;
    if (fate == Fate::one_killed && odd) continue;
    if (fate == Fate::dies_telling && rank == world.impatient_rank) continue;
    if (!ending.over) return "a rank has not ended";
    if (fate == Fate::none || fate == Fate::all_leave) {
      if (ending.status != Status::arrived) return "a wait failed";
      continue;
    }
    if (odd && fate != Fate::one_differs) {
      if (ending.status != Status::arrived || ending.epochs != 2)
        return "the odd rank's own operations failed";
      continue;
    }
    if (ending.status == Status::arrived) return "a rank did not learn that an operation failed";
    const std::string fault = judge_fault(world, ending.fault);
    if (!fault.empty()) return fault;
  }
  return "";
}

}  // namespace flexep::sim
