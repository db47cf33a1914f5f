// The order in which rows leave: a row goes once to each owner of its slots (a rank, or a domain), owner by owner, and
// inside an owner in row order. Positions come from sums of counts, so any number of lanes, warps and blocks writes the
// same integers.
//
// An owner stands for `unit` consecutive ids; a slot has one id, or -1. A step numbers in one phase and places in a
// later one; between them lie the blocks' counts, [blocks, owners], in a workspace.
#pragma once
#include <cstdint>

#include "plan/first_slot.h"
#include "plan/numbering.h"
#include "plan/records.h"

namespace flexep {

struct SendOrder {
  int rows, top_k;
  int owners, unit;
  int split;     // positions that an owner has in the send buffer; < 0: as many as it needs
  int num_send;  // length of the send buffer

  int32_t* order;       // [rows, top_k] scratch: from one phase to the next
  int32_t* slot_send;   // out [rows, top_k] position that carries the slot; -1 none
  int32_t* send_row;    // out [rows, top_k] positions of the row, owners ascending, then -1
  int32_t* send_first;  // out [rows, top_k] the first ids of their owners, then -1
  int32_t* send_token;  // out [num_send] row at each position; -1 unused
  int32_t* counts;      // out [owners] rows that leave for each

  FLEXEP_HD static int64_t numbering_ints(int owners, int warps) {
    return 2 * KeyCounts::ints(owners, warps);
  }
  FLEXEP_HD static int64_t placing_ints(int owners, int lanes) {
    return 2 * static_cast<int64_t>(owners) + BlockCounts::scratch_ints(owners, lanes);
  }

  /// ids(t): the ids of the slots of row t. find_id(read(i, t, k), i) says or makes one of them before, once.
  /// Leaves in `order` the number, among the block's, of those slots that are their row's first of an owner.
  template <class Team, class Read, class FindId, class Ids>
  FLEXEP_HD void number(const Team& team, int32_t* workspace, int32_t* shared, const Read& read,
                        const FindId& find_id, const Ids& ids) const {
    const KeyCounts leaving{shared, owners};
    const FirstSlots first(team, shared + KeyCounts::ints(owners, team.warps()), owners);
    leaving.clear(team);
    for_warp_slots(team, rows, top_k, read, [&](const auto& slot, int64_t i, int t, int k, bool valid) {
      const int owner = owner_of(valid ? find_id(slot, i) : -1);
      const uint32_t same = team.peers(owner);
      const bool leaves = first.is_first(team, owner, t, k, same);
      const int32_t number = leaving.add(team, leaves ? owner : -1, same & team.ballot(leaves));
      if (!valid) return;
      order[i] = number;
      if constexpr (requires { Team::kOneLane; })
        slot_send[i] = send_row[i] = send_first[i] = -1;  // `place` writes over them
    });
    leaving.finish(team, workspace + static_cast<int64_t>(team.block()) * owners);
    if (team.warps() == 1) return;
    struct Numbered {
      int32_t number = -1;
      int id = -1;
    };
    const auto read_back = [&](int64_t i, int t, int k) { return Numbered{order[i], ids(t)[k]}; };
    for_warp_slots(team, rows, top_k, read_back, [&](const Numbered& slot, int64_t i, int, int, bool) {
      if (slot.number >= 0) order[i] = slot.number + leaving.below(team, owner_of(slot.id));
    });
  }

  /// Positions, in a later phase, and the records at them. slots(t): the TokenSlots of row t, with the same ids.
  template <class Team, class Slots>
  FLEXEP_HD void place(const Team& team, const int32_t* workspace, int32_t* shared, const Slots& slots,
                       const Records& records) const {
    int32_t *const first = shared, *const total = shared + owners;  // [owners] each
    const BlockCounts blocks{workspace, team.blocks(), owners, owners};
    blocks.sum(team, team.block(), first, total, shared + 2 * owners);
    if (team.warp() == 0) begin_owners(team, first, total);
    team.sync();
    clear_unused(team, total, records);
    if constexpr (requires { Team::kOneLane; })
      place_alone(team, first, slots, records);
    else
      for_warp_tokens(
          team, rows, top_k, [&](int t, int k) { return read_slot(slots(t), records.shape, t, k); },
          [&](const Leaving& slot, int t, int k, bool valid) {
            place_slot(team, first, slot, records, t, k, valid);
          });
  }

 private:
  FLEXEP_HD int owner_of(int id) const { return id < 0 || unit == 1 ? id : id / unit; }

  /// first[o]: the position of the block's first row for owner o. total[o] becomes the end of the used positions of o.
  template <class Team>
  FLEXEP_HD void begin_owners(const Team& team, int32_t* first, int32_t* total) const {
    const LaneRange mine(WarpLanes<Team>{team}, owners);
    int32_t begin = 0;
    FLEXEP_ROLLED
    for (int o = mine.begin; o < mine.end; ++o) begin += total[o];
    begin = team.warp_scan(begin);
    FLEXEP_ROLLED
    for (int o = mine.begin; o < mine.end; ++o) {
      const int32_t at = split < 0 ? begin : o * split;
      if (team.block() == 0) counts[o] = total[o];
      begin += total[o];
      first[o] += at;
      total[o] += at;
    }
  }

  template <class Team>
  FLEXEP_HD void clear_unused(const Team& team, const int32_t* used_end, const Records& records) const {
    const int64_t dense = split < 0 ? used_end[owners - 1] : 0;
    FLEXEP_ROLLED
    for (int64_t i = dense + grid_rank(team); i < num_send; i += grid_size(team)) {
      const int o =
          split > 0 ? static_cast<int>(static_cast<uint32_t>(i) / static_cast<uint32_t>(split)) : owners - 1;
      if (i < used_end[o < owners ? o : owners - 1]) continue;
      send_token[i] = -1;
      records.clear(i);
    }
  }

  template <class Team, class Slots>
  FLEXEP_HD void place_alone(const Team& team, const int32_t* first, const Slots& slots,
                             const Records& records) const {
    const auto read = [this](int64_t i, int, int) { return order[i]; };
    for_warp_slots(team, rows, top_k, read, [&](int32_t number, int64_t i, int t, int k, bool) {
      if (number < 0) return;
      const TokenSlots mine = slots(t);
      const int owner = owner_of(mine.ids[k]);
      const int32_t position = first[owner] + number;
      list_owner(i - k, mine.ids, owner * unit, position);
      if (position >= num_send) return;
      send_token[position] = t;
      records.write(position, mine, owner * unit, unit);
    });
  }

  /// Puts an owner of the row whose slots begin at `at` into its lists, and its position beside all slots of it. The
  /// other slots are written again as they are: guessing a branch would fail half the time.
  FLEXEP_HD void list_owner(int64_t at, const int32_t* ids, int first_id, int32_t position) const {
    const uint32_t size = static_cast<uint32_t>(unit);
    const int32_t* const numbers = order + at;
    int32_t* const send = slot_send + at;
    int lower = 0;  // owners of the row below this one
    for (int k = 0; k < top_k; ++k) lower += (numbers[k] >= 0) & (ids[k] < first_id);
    send_first[at + lower] = first_id;
    send_row[at + lower] = position;
    FLEXEP_INDEPENDENT
    for (int k = 0; k < top_k; ++k)
      send[k] = static_cast<uint32_t>(ids[k] - first_id) < size ? position : send[k];
  }

  /// A slot, and its number among those that leave for its owner; -1: another of its row does.
  struct Leaving {
    int32_t number = -1;
    TokenSlot slot;
  };
  FLEXEP_HD Leaving read_slot(const TokenSlots& all, const RecordShape& shape, int t, int k) const {
    return {order[static_cast<int64_t>(t) * top_k + k],
            {all.token, all.ids[k], all.rows[k], shape.has_weights ? all.weights[k] : 0}};
  }

  /// The same where the lanes of a warp hold the slots of a row: what each has read it shows the others.
  template <class Team>
  FLEXEP_HD void place_slot(const Team& team, const int32_t* first, const Leaving& leaving,
                            const Records& records, int t, int k, bool valid) const {
    const int64_t at = static_cast<int64_t>(t) * top_k;
    const int32_t number = leaving.number;
    const int owner = owner_of(leaving.slot.id), begin = team.lane() - k;
    const int32_t position = number < 0 ? -1 : first[owner] + number;
    int owners_here = 0, lower = 0;  // owners of the row, and of them those below this one
    int32_t send = -1;
    for (int j = 0; j < top_k; ++j) {
      const int32_t there = team.warp_get(position, begin + j);
      const int its = team.warp_get(owner, begin + j);
      owners_here += there >= 0, lower += there >= 0 && its < owner;
      if (there >= 0 && its == owner) send = there;
      if (valid && there >= 0 && there < num_send)
        records.write_slot(there, leaving.slot, k, its * unit, unit);
    }
    if (valid) slot_send[at + k] = send;
    if (position >= 0) send_first[at + lower] = owner * unit, send_row[at + lower] = position;
    if (valid && k >= owners_here) send_first[at + k] = send_row[at + k] = -1;
    if (position >= 0 && position < num_send) send_token[position] = t;
  }
};

}  // namespace flexep
