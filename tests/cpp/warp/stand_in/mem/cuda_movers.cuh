// Movers that move nothing: the pieces that a feeder is given are kept, in their order.
#pragma once
#include <optional>
#include <vector>

#include "base/team.h"
#include "mem/cuda.cuh"
#include "warp/warp.h"

namespace flexep {

struct MoverWarp : Lane {};

/// An address that nobody looks at.
inline char* fake_address(int space, std::size_t at) {
  return reinterpret_cast<char*>((static_cast<std::uintptr_t>(space) + 1) << 40) + at;
}

/// Rows and bytes that have gone to a rank.
struct Counted {
  std::int64_t rows = 0, bytes = 0;
  bool operator==(const Counted&) const = default;
};

/// What all lanes of a feeder have given a ring.
template <class Note>
struct FedPieces {
  struct Piece {
    const char* from;
    int bytes;
    Note note;
  };
  int stages, stage_bytes;
  std::vector<Piece> fed;
  std::vector<std::optional<Piece>> staged = std::vector<std::optional<Piece>>(stages);
  Counted counted[warp::kLanes] = {};
};

/// That of a lane; see mem/cuda_movers.cuh of csrc.
template <class Note>
class FeedMover {
 public:
  explicit FeedMover(FedPieces<Note>& pieces) : pieces_(pieces) {}

  int piece_bytes() const { return pieces_.stage_bytes; }
  int stages() const { return pieces_.stages; }
  char* address(int rank, std::size_t at) const { return fake_address(rank, at); }
  void count_rows(int, int rows, std::int64_t row_bytes) {
    Counted& counted = pieces_.counted[warp::the_warp.lane()];
    counted.rows += rows, counted.bytes += rows * row_bytes;
  }
  void move_as(int number, const void* from, int bytes, const Note& note) const {
    if (number < 0 || number >= stages()) warp::fail("piece %d of %d stages", number, stages());
    if (pieces_.staged[number]) warp::fail("two pieces have number %d", number);
    pieces_.staged[number] = {static_cast<const char*>(from), bytes, note};
  }
  void moved_many(int count, const warp::Place& place = warp::Place::current()) {
    for (const std::uint64_t shown : warp::the_warp.meet(count, place))
      if (shown != static_cast<std::uint64_t>(count)) warp::fail("lanes have moved different numbers");
    if (warp::the_warp.lane() == 0) {
      for (int i = 0; i < stages(); ++i) {
        if (pieces_.staged[i].has_value() != (i < count)) warp::fail("piece %d of %d", i, count);
        if (i < count) pieces_.fed.push_back(*pieces_.staged[i]);
        pieces_.staged[i].reset();
      }
    }
    warp::the_warp.meet(0, warp::Place::current());
  }

 private:
  FedPieces<Note>& pieces_;
};

/// Of warps that add what a feeder brings, which are not run here.
struct FedTeam {
  int lane() const;
};
template <class Note>
struct Reader {
  bool next(Note& note) const;
  const char* piece() const;
  void pass();
};

}  // namespace flexep
