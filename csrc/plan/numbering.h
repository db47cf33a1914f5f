// Numbers of items that share a key, in index order, without an atomic: each warp owns a contiguous range of items and
// counts its own keys, a block adds up its warps, and the next phase adds up the blocks below (sum_columns).
#pragma once
#include <cstdint>

#include "plan/block.h"

namespace flexep {

/// What each warp of a block has counted of each key: shared [warps, keys].
struct KeyCounts {
  int32_t* counts;
  int keys;

  static FLEXEP_HD int64_t ints(int keys, int warps) { return static_cast<int64_t>(keys) * warps; }

  /// This warp's counts to zero. Nobody else may be reading them.
  template <class Team>
  FLEXEP_HD void clear(const Team& team) const {
    int32_t* const mine = of_warp(team);
    FLEXEP_ROLLED
    for (int key = team.lane(); key < keys; key += team.width()) mine[key] = 0;
    team.warp_sync();
  }

  /// Counts one item a lane, lane order being item order, and returns its number among the warp's items of that key;
  /// -1 where the key is negative. `equal`: the lanes that count an item of this lane's key. All lanes call together.
  template <class Team>
  FLEXEP_HD int32_t add(const Team& team, int32_t key, uint32_t equal) const {
    int32_t* const mine = of_warp(team);
    const int below = count_bits(equal & lanes_below(team.lane()));
    const int32_t number = key < 0 ? -1 : mine[key] + below;
    team.warp_sync();
    if (key >= 0 && below == 0) mine[key] += count_bits(equal);
    team.warp_sync();
    return number;
  }

  /// When all warps have added: writes the block's counts to totals [keys] and leaves in `counts` what lower warps
  /// counted. Begins and ends with a sync.
  template <class Team>
  FLEXEP_HD void finish(const Team& team, int32_t* totals) const {
    team.sync();
    FLEXEP_ROLLED
    for (int key = team.rank(); key < keys; key += team.size()) totals[key] = scan_warps(team, key);
    team.sync();
  }

  /// After finish: how many items of the key lower warps of the block counted.
  template <class Team>
  FLEXEP_HD int32_t below(const Team& team, int32_t key) const {
    return of_warp(team)[key];
  }

 private:
  template <class Team>
  FLEXEP_HD int32_t* of_warp(const Team& team) const {
    return counts + ints(keys, team.warp());
  }

  template <class Team>
  FLEXEP_HD int32_t scan_warps(const Team& team, int key) const {
    constexpr int kBatch = 8;  // loads in flight
    int32_t sum = 0;
    FLEXEP_ROLLED
    for (int first = 0; first < team.warps(); first += kBatch) {
      int32_t n[kBatch];
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j)
        n[j] = first + j < team.warps() ? counts[ints(keys, first + j) + key] : 0;
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        if (first + j < team.warps()) counts[ints(keys, first + j) + key] = sum;
        sum += n[j];
      }
    }
    return sum;
  }
};

/// What every block counted of every key, a row a block: [rows, keys], rows `stride` ints apart.
struct BlockCounts {
  const int32_t* counts;
  int rows, stride, keys;

  static FLEXEP_HD int64_t scratch_ints(int keys, int lanes) {
    return 2 * static_cast<int64_t>(keys > lanes ? keys : lanes);
  }

  /// below[key] = the sum of the rows before `row`; total[key] = that of all rows, unless `total` is null. All lanes of
  /// a block call; they share the rows of a column by way of `scratch`. Begins and ends with a sync.
  template <class Team>
  FLEXEP_HD void sum(const Team& team, int row, int32_t* below, int32_t* total, int32_t* scratch) const {
    constexpr int kFewest = 4;  // rows worth a lane of their own
    const int most = (rows + kFewest - 1) / kFewest;
    int parts = team.size() / keys;
    parts = parts > most ? most : parts;
    parts = parts < 1 ? 1 : parts;
    int32_t* const part_below = parts == 1 ? below : scratch;
    int32_t* const part_total = parts == 1 ? total : scratch + static_cast<int64_t>(parts) * keys;
    team.sync();
    FLEXEP_ROLLED
    for (int i = team.rank(); i < parts * keys; i += team.size()) {
      const int part = parts == 1 ? 0 : i / keys;
      const int key = i - part * keys;
      const Share mine = parts == 1 ? Share(rows) : Share(rows, part, parts);
      const bool few = rows <= kFew * parts;
      const Sums sums = few ? sum_column<kFew>(key, mine, row) : sum_column<kMany>(key, mine, row);
      part_below[i] = sums.below;
      if (part_total) part_total[i] = sums.total;
    }
    team.sync();
    if (parts == 1) return;
    FLEXEP_ROLLED
    for (int key = team.rank(); key < keys; key += team.size()) {
      Sums sums{0, 0};
      FLEXEP_ROLLED
      for (int part = 0; part < parts; ++part) {
        sums.below += part_below[part * keys + key];
        sums.total += part_total[part * keys + key];
      }
      below[key] = sums.below;
      if (total) total[key] = sums.total;
    }
    team.sync();
  }

 private:
  struct Sums {
    int32_t below, total;
  };

  // Loads in flight: all of 4096 tokens with 8 slots, and for few blocks no more instructions than they need.
  static constexpr int kFew = 4, kMany = 32;
  template <int kBatch>
  FLEXEP_HD Sums sum_column(int key, const Share& mine, int row) const {
    Sums sums{0, 0};
    FLEXEP_ROLLED
    for (int first = mine.begin; first < mine.end; first += kBatch) {
      const int32_t* const here = counts + static_cast<int64_t>(first) * stride + key;
      int32_t n[kBatch];
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) n[j] = first + j < mine.end ? here[j * stride] : 0;
      FLEXEP_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        sums.total += n[j];
        sums.below += first + j < row ? n[j] : 0;
      }
    }
    return sums;
  }
};

}  // namespace flexep
