// The handshake: the one place that knows words, epochs, orders and credits.
//
//   writer                                           reader
//   claim(chunk)     wait for the slot  (acquire)
//   put rows ...     (whole team)
//   settle()         drain, sync
//   announce(chunk)  post               (release) -> arrive(chunk)   wait, sync   (acquire)
//                                                    use rows ...    (whole team)
//                                                    settle()        drain, sync
//   claim(chunk+slots)                  (acquire) <- release(chunk)  post         (release)
//
// A push and a pull differ only in where the rows lie: a pusher puts them into the reader's window, an owner puts them
// into its own and the puller reads them there. Writers and readers are concurrent roles; a rank that did one after the
// other would deadlock as soon as there are more chunks than slots.
//
// `Mem` must offer (mem/host.h is the plain one):
//   void put(int to, size_t at, const void* from, size_t bytes)  into `to`'s window; asynchronous: it need not be
//                     anywhere before this lane's drain, and `from` stays as it is until then
//   void* target(int to, size_t at, size_t bytes)                where this lane may write what it would put there,
//                     until its drain: the window itself, or memory that the drain puts
//   const void* view(int from, size_t at, size_t bytes)          bytes of `from`'s window as this lane may see them; the
//                     reader's own copy or the memory itself, until the lane's next sync
//   void drain()      this lane's puts are in place: a later post by this lane, or by its leader after a team sync,
//                     publishes them
//   void post(int to, size_t at, Signal)                         release, of this lane and of what its team has synced
//   void put_then_post(int to, size_t at, const void* from, size_t bytes, size_t word_at, Signal)
//                     the same as put, drain, post, as one message where a network orders nothing else
//   Signal load(size_t at)                                       acquire, of a word in this rank's own window
//   Idle idle(size_t at, Signal seen, Clock&)                    what to do after a look in vain (wait.h): in each wait
//                     it says `look_around` at least once, and again soon after a stop word was posted
//   bool stop_once()  true for the first role of the rank that stops the window
// `Team`: rank(), size(), sync(), and broadcast(int), the leader's value on every lane (it syncs). Lane 0 leads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/hd.h"
#include "proto/state.h"
#include "proto/wait.h"
#include "proto/window.h"

namespace flexep {

/// One operation of one rank, the same for all its roles.
struct Operation {
  int rank;
  Epoch epoch;
  int op;            // the caller's number of the operation, below 256
  Epoch* last_used;  // [kChannels][ranks] of the slice, see WindowState
  double seconds;    // how long any one wait may take
};

/// What a line's free word says once its reader has given back all of an operation.
FLEXEP_HD constexpr Signal all_given_back(Epoch epoch, int op) { return make_signal(epoch + 1, 0, op); }

template <class Mem, class Team>
class Exchange {
 public:
  FLEXEP_HD Exchange(Mem& mem, Team& team, const WindowLayout& layout, const Operation& operation)
      : mem_(mem), team_(team), layout_(layout), op_(operation) {}

  FLEXEP_HD const WindowLayout& layout() const { return layout_; }
  FLEXEP_HD const Topology& topology() const { return layout_.shape.topology; }
  FLEXEP_HD const Operation& operation() const { return op_; }
  FLEXEP_HD int rank() const { return op_.rank; }
  FLEXEP_HD Mem& mem() const { return mem_; }
  FLEXEP_HD Team& team() const { return team_; }
  /// What a word says after `chunks` chunks of this operation.
  FLEXEP_HD Signal signal(int chunks) const { return make_signal(op_.epoch, chunks, op_.op); }

  /// Writer: waits until the slot of `chunk` is free. The first chunk of an operation waits until the line's last
  /// operation has been read to its end, so every slot is free then.
  FLEXEP_HD Status claim(Channel channel, const Line& line, int chunk) {
    const int slots = layout_.shape.slots;
    if (chunk > 0 && chunk < slots) return Status::arrived;
    if (chunk == 0) {
      const Status status = emptied_before(channel, line);
      if (status == Status::arrived) take(channel, line);
      return status;
    }
    Status status = Status::arrived;
    if (team_.rank() == 0)
      status = await(free_word(channel), line.here, signal(chunk + 1 - slots), line.peer);
    return static_cast<Status>(team_.broadcast(static_cast<int>(status)));
  }
  /// Writer: waits until the line's last operation has been read to its end, and writes nothing down.
  FLEXEP_HD Status emptied_before(Channel channel, const Line& line) {
    Status status = Status::arrived;
    if (team_.rank() == 0 && last_used(channel, line) != 0)
      status =
          await(free_word(channel), line.here, all_given_back(last_used(channel, line), op_.op), line.peer);
    return static_cast<Status>(team_.broadcast(static_cast<int>(status)));
  }
  /// Writer, of an idle line: writes down that this operation uses it, which its reader then gives back.
  FLEXEP_HD void take(Channel channel, const Line& line) {
    if (team_.rank() == 0) last_used(channel, line) = op_.epoch;
  }

  /// Writer: waits until the reader has given back every chunk of this operation.
  FLEXEP_HD Status emptied(Channel channel, const Line& line) {
    Status status = Status::arrived;
    if (team_.rank() == 0)
      status = await(free_word(channel), line.here, all_given_back(op_.epoch, op_.op), line.peer);
    return static_cast<Status>(team_.broadcast(static_cast<int>(status)));
  }

  /// Whole team, after it has put or read: what was put is in place, what was read asynchronously has been read, and
  /// the leader may say so.
  FLEXEP_HD void settle() {
    mem_.drain();
    team_.sync();
  }

  /// Writer, once its chunk is settled: says that it is in place.
  FLEXEP_HD void announce(Channel channel, const Line& line, int chunk) {
    if (team_.rank() == 0)
      mem_.post(line.peer, layout_.word(ready_word(channel), line.there), signal(chunk + 1));
  }

  /// Reader: waits until the chunk is in place.
  FLEXEP_HD Status arrive(Channel channel, const Line& line, int chunk) {
    Status status = Status::arrived;
    if (team_.rank() == 0) status = await(ready_word(channel), line.here, signal(chunk + 1), line.peer);
    return static_cast<Status>(team_.broadcast(static_cast<int>(status)));
  }

  /// Reader, once its reads are settled: gives the slot back. The last chunk of an operation gives everything back,
  /// whatever the next one is.
  FLEXEP_HD void release(Channel channel, const Line& line, int chunk, bool last) {
    if (team_.rank() == 0)
      mem_.post(line.peer, layout_.word(free_word(channel), line.there),
                last ? all_given_back(op_.epoch, op_.op) : signal(chunk + 1));
  }

  /// Leader only: waits for a word of my own window; on anything but `arrived` stops the window for everybody.
  /// If I wait for myself, another of my roles waits for somebody else: it has half the time, so that the record says
  /// for whom.
  FLEXEP_HD Status await(Word word, int index, Signal want, int awaited) {
    const double seconds = awaited == op_.rank ? 2 * op_.seconds : op_.seconds;
    const Waited waited = wait_for(mem_, layout_, word, index, want, awaited, seconds);
    if (waited.status != Status::arrived) stop(waited, word, want, awaited);
    return waited.status;
  }

  /// Stops the window if a peer has given up, though nobody waits for it.
  FLEXEP_HD void heed() {
    for (int peer = 0; peer < topology().ranks; ++peer)
      if (mem_.load(layout_.word(Word::stopped, peer)) == kGaveUp && team_.rank() == 0)
        return stop({Status::stopped, 0, peer}, Word::stopped, 0, peer);
  }

  /// Stops the window without a wait: this operation may not run.
  FLEXEP_HD void refuse(Status why) {
    if (team_.rank() == 0) stop({why, 0, -1}, Word::stopped, 0, op_.rank);
  }

 private:
  FLEXEP_HD Epoch& last_used(Channel channel, const Line& line) const {
    return op_.last_used[static_cast<int>(channel) * topology().ranks + line.here];
  }
  /// Tells every peer, once a rank, so that nobody waits for somebody who has given up. What a peer said is passed on:
  /// it may have died while it told the others.
  FLEXEP_HD void stop(const Waited& waited, Word word, Signal want, int awaited) {
    if (!mem_.stop_once()) return;
    FaultRecord fault{op_.epoch, op_.op,    static_cast<int>(waited.status),
                      op_.rank,  awaited,   static_cast<int>(word),
                      want,      waited.got};
    if (waited.status == Status::stopped) {
      const auto* said = static_cast<const FaultRecord*>(
          mem_.view(op_.rank, layout_.faults.of(static_cast<std::size_t>(waited.by)), sizeof(FaultRecord)));
      fault = *said;
    }
    for (int step = 0; step < topology().ranks; ++step) {
      const int to = (op_.rank + step) % topology().ranks;  // my own other roles first
      mem_.put_then_post(to, layout_.faults.of(static_cast<std::size_t>(op_.rank)), &fault, sizeof fault,
                         layout_.word(Word::stopped, op_.rank), kGaveUp);
    }
  }

  Mem& mem_;
  Team& team_;
  const WindowLayout& layout_;
  const Operation op_;
};

}  // namespace flexep
