// Sends the rows of a delivery ahead of its plan: the GPU's copy engines put all of a rank's rows into every peer's
// window, while the plan is made, and take no multiprocessor for it. A delivery over such windows places what has come.
//
//   stream                             beside it, one that copies     and one that posts
//   start: lines idle?  ------------>  a piece of x to each peer -->  its chunks are there
//   plan                               the next piece ------------->  ...
//   deliver: waits for peers' chunks
//   join                <------------------------------------------  all pieces of mine are there
//
// What both beside it do is one graph where as many tokens were sent before. What deliver.h's `send_ahead` does in one
// place. Who posts is a kernel of one CTA, for which there must be room on the GPU beside everything that waits.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/device_exec.h"

namespace flexep {

/// What one hosted rank sends: [tokens, a row of the window].
struct AheadArgs {
  const void* x;
  int tokens;
};

/// Multiprocessors that must be left free for those who post.
constexpr int kAheadSms = 4;

class SendAhead {
 public:
  /// `windows`: address of every rank's window as this GPU maps it. On the current GPU; throws Error if it refuses
  /// streams, NotBuilt without a CUDA side.
  SendAhead(const DeviceWorld& world, const std::vector<std::uintptr_t>& windows);
  ~SendAhead();

  /// Behind what the stream holds, for the next delivery of the window: one `args` a hosted rank. Every rank that
  /// delivers has called this before, with as many operations of the window between the two. Again without a delivery
  /// after it, if every rank leaves it out: what was sent is overwritten then, and an operation lies between.
  void start(const std::vector<AheadArgs>& args, int op, double seconds, std::uintptr_t stream);
  /// What the stream does from here on comes behind the copies, if they are not joined yet: x is the caller's again.
  void join(std::uintptr_t stream);

 private:
  class Streams;
  std::unique_ptr<Streams> streams_;
};

}  // namespace flexep
