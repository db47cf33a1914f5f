// A ring that one warp feeds and a team reads (mem/fed_ring.cuh): pieces and notes come in order, stages are loaded again
// only when all have read them, and what readers have stored is seen by the feeder that has waited for them.
#pragma once
#include "litmus_common.cuh"
#include "litmus_ring.cuh"
#include "mem/fed_ring.cuh"

namespace litmus {

using flexep::FedTeam;

constexpr int kFedRows = 12;  // a round
constexpr int kFedReaders = 4, kReaderLanes = 32 * kFedReaders;

enum class FedPlant { none, pass_before_read, no_finish };

struct FedNote {
  std::uint32_t* folds;  // [kReaderLanes], where readers say what they have read
};

/// What a reader's lane makes of a row: every kReaderLanes-th word from its own.
template <class Word>
__device__ std::uint32_t fold_of_lane(int lane, const Word& word) {
  std::uint32_t sum = 0;
  for (int w = lane; w < kRowWords; w += kReaderLanes) sum = fold(sum, word(w));
  return sum;
}

template <FedPlant kPlant>
__device__ void read_rows(flexep::Reader<FedNote>& reader, int lane) {
  for (FedNote note; reader.next(note);) {
    const auto* const words = reinterpret_cast<const volatile std::uint32_t*>(reader.piece());
    if constexpr (kPlant == FedPlant::pass_before_read) {
      reader.pass();
      __nanosleep(5000);  // longer than a load takes
    }
    const std::uint32_t sum = fold_of_lane(lane, [&](int w) { return words[w]; });
    store_plain(note.folds + lane, sum);
    if constexpr (kPlant != FedPlant::pass_before_read) reader.pass();
  }
}

/// Whether the lanes of all readers have said what the rows of this round hold; the youngest row is looked at first. All
/// lanes of the feeder call together.
__device__ inline bool folds_are_right(const std::uint32_t* folds, int round) {
  bool right = true;
  for (int i = kFedRows * kReaderLanes - 32 + static_cast<int>(threadIdx.x); i >= 0; i -= 32) {
    const int row = source_row(round, i / kReaderLanes);
    right &=
        load_plain(folds + i) == fold_of_lane(i % kReaderLanes, [&](int w) { return source_word(row, w); });
  }
  return __all_sync(0xffffffffu, right);
}

template <FedPlant kPlant>
__global__ void feed_rows(char* const* windows, const char* sources, int stages, int rounds, Tally& tally) {
  const FedTeam team{static_cast<int>(threadIdx.x) / 32, 1, kFedReaders};
  const flexep::FedLayout<FedNote> layout(stages, kRowBytes);
  if (!team.feeds()) {
    flexep::Reader<FedNote> reader(layout, 0, team);
    return read_rows<kPlant>(reader, team.lane());
  }
  flexep::Feeder<FedNote> feeder(layout, 0, team);
  auto* const folds = reinterpret_cast<std::uint32_t*>(windows[blockIdx.x]);
  for (int round = 1; round <= rounds; ++round) {
    for (int first = 0, some; first < kFedRows; first += some) {
      some = min(kFedRows - first, stages);
      const int lane = static_cast<int>(threadIdx.x), i = first + lane;
      if (lane < some)
        feeder.load_as(lane, sources + static_cast<std::size_t>(source_row(round, i)) * kRowBytes, kRowBytes,
                       {folds + i * kReaderLanes});
      feeder.loaded_many(some);
    }
    if constexpr (kPlant != FedPlant::no_finish) feeder.finish();
    const bool right = folds_are_right(folds, round);
    if (threadIdx.x == 0) count(tally, !right);
    __syncwarp();
    feeder.finish();
  }
  feeder.end();
}

inline void run_fed(int pairs_count, int rounds) {
  const Pairs pairs(pairs_count);
  char* sources = nullptr;
  LITMUS_CHECK(cudaMalloc(&sources, kSources * kRowBytes));
  fill_sources<<<kSources, 256>>>(reinterpret_cast<std::uint32_t*>(sources));
  const auto feed = [&](const char* variant, int stages, auto* kernel) {
    run("fed-ring", variant, [&](Tally& tally) {
      pairs.clear();
      alone_on_its_sm(kernel)<<<2 * pairs_count, 32 * (1 + kFedReaders), kOneCtaPerSm>>>(
          pairs.windows, sources, stages, rounds, tally);
    });
  };
  feed("right-1-stage", 1, feed_rows<FedPlant::none>);
  feed("right-3-stages", 3, feed_rows<FedPlant::none>);
  feed("right-8-stages", 8, feed_rows<FedPlant::none>);
  feed("pass-before-read", 1, feed_rows<FedPlant::pass_before_read>);
  feed("no-finish", 3, feed_rows<FedPlant::no_finish>);
  cudaFree(sources);
}

}  // namespace litmus
