// Who does a role's work. A role is a row of steps; in each it waits for signals, moves rows, and tells peers.
//
//   TeamCrew    one team does all three, one after the other
//   SplitCrew   lanes that wait, lanes that move and lanes that post walk through the same steps, each at its own pace
//
//     waiter                       movers                          poster
//     wait (acquire)
//     set_granted(step)  ------->  granted() >= step
//                                  put, read ...; drained
//                                  set_moved(mover, step)  ----->  moved(each mover) >= step
//                                                                  post (release)
//
// Only a missing chunk or credit holds up a mover then, never a look at a word or a post; and what a mover has in
// flight may last over several steps.
//
// A role calls, on every lane of its crew:
//   step(wait, move, post)  wait(exchange) -> Status, move(mem, lanes), post(exchange)
//   only_move(move), only_wait(wait)   what belongs to no step: before the first, and after the last
//   MoveLanes               the type of move's lanes
#pragma once
#include "proto/exchange.h"

namespace flexep {

template <class Mem, class Team>
class TeamCrew {
 public:
  using MoveLanes = Team;

  FLEXEP_HD explicit TeamCrew(Exchange<Mem, Team>& exchange) : exchange_(exchange) {}

  FLEXEP_HD const WindowLayout& layout() const { return exchange_.layout(); }
  FLEXEP_HD int rank() const { return exchange_.rank(); }

  template <class Wait, class Move, class Post>
  FLEXEP_HD Status step(const Wait& wait, const Move& move, const Post& post) {
    const Status status = wait(exchange_);
    if (status != Status::arrived) return status;
    only_move(move);
    exchange_.settle();
    post(exchange_);
    return Status::arrived;
  }
  template <class Move>
  FLEXEP_HD void only_move(const Move& move) {
    move(exchange_.mem(), exchange_.team());
  }
  template <class Wait>
  FLEXEP_HD Status only_wait(const Wait& wait) {
    return wait(exchange_);
  }

 private:
  Exchange<Mem, Team>& exchange_;
};

/// What a lane of a SplitCrew does.
enum class Actor { waiter, mover, poster };
/// One that is known when the code is compiled.
template <Actor kActor>
struct ActorIs {
  FLEXEP_HD constexpr operator Actor() const { return kActor; }
};

/// What the lanes of a SplitCrew tell each other is kept in `Progress` (CrewCounts of mem/cuda_warps.cuh). Who reads a
/// count has seen what the lane that set it had seen and done before.
///   void set_granted(int steps), int granted()         by the waiter: steps that may be moved, or kNoMore
///   void set_moved(int mover, int steps), int moved(int mover)   by that mover
///   void pause()                                        after a look in vain
constexpr int kNoMore = -1;

/// `Mover` is the Mem of a lane that moves, which may have several steps in flight:
///   void begin(int step)   what is put and read from now on belongs to that step
///   int done()             every put and read of steps up to this one is complete
///   void finish()          waits until all of them are
///
/// `Who`: Actor, or ActorIs, with which only that lane's part of a role is compiled.
template <class Who, class Mem, class Team, class Mover, class Lanes, class Progress>
class SplitCrew {
 public:
  using MoveLanes = Lanes;

  /// `mover` and `lanes` are used by movers only: lanes.rank() of lanes.size().
  FLEXEP_HD SplitCrew(Who actor, Exchange<Mem, Team>& exchange, Mover& mover, const Lanes& lanes,
                      Progress& progress)
      : actor_(actor), exchange_(exchange), mover_(mover), lanes_(lanes), progress_(progress) {}

  FLEXEP_HD const WindowLayout& layout() const { return exchange_.layout(); }
  FLEXEP_HD int rank() const { return exchange_.rank(); }

  template <class Wait, class Move, class Post>
  FLEXEP_HD Status step(const Wait& wait, const Move& move, const Post& post) {
    ++step_;
    if (actor_ == Actor::waiter) return grant(wait);
    if (actor_ == Actor::mover) return carry(move);
    if (!all_moved()) return Status::stopped;
    post(exchange_);
    return Status::arrived;
  }
  template <class Move>
  FLEXEP_HD void only_move(const Move& move) {
    if (actor_ == Actor::mover) move(mover_, lanes_);
  }
  template <class Wait>
  FLEXEP_HD Status only_wait(const Wait& wait) {
    return actor_ == Actor::waiter ? wait(exchange_) : Status::arrived;
  }
  /// Nothing is in flight any more, and the poster may say so. The last call of every lane, however the role ended, and
  /// one before anything long that belongs to no step.
  FLEXEP_HD void finish() {
    if (actor_ == Actor::mover) settle();
  }

 private:
  template <class Wait>
  FLEXEP_HD Status grant(const Wait& wait) {
    const Status status = wait(exchange_);
    progress_.set_granted(status == Status::arrived ? step_ : kNoMore);
    return status;
  }
  template <class Move>
  FLEXEP_HD Status carry(const Move& move) {
    if (granted_ < step_ && !look()) {
      settle();  // whom the waiter waits for may wait for these
      while (!look()) {
        if (granted_ == kNoMore) return Status::stopped;
        progress_.pause();
      }
    }
    mover_.begin(step_);
    move(mover_, lanes_);
    report();
    return Status::arrived;
  }
  FLEXEP_HD bool look() {
    granted_ = progress_.granted();
    return granted_ >= step_;
  }
  FLEXEP_HD void settle() {
    mover_.finish();
    report();
  }
  FLEXEP_HD void report() { progress_.set_moved(lanes_.rank(), mover_.done()); }
  /// False if the waiter has given up.
  FLEXEP_HD bool all_moved() {
    for (int mover = 0; mover < lanes_.size(); ++mover)
      while (progress_.moved(mover) < step_) {
        if (progress_.granted() == kNoMore) return false;
        progress_.pause();
      }
    return true;
  }

  const Who actor_;
  Exchange<Mem, Team>& exchange_;
  Mover& mover_;
  const Lanes lanes_;
  Progress& progress_;
  int step_ = 0, granted_ = 0;
};

}  // namespace flexep
