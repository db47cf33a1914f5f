#include "kernels/device_ahead.h"

#include <algorithm>
#include <iterator>

#include "base/cuda_check.h"
#include "kernels/chunks.h"
#include "kernels/device_part.cuh"

namespace flexep {
namespace {

constexpr int kBeginLanes = 1024, kPostLanes = 128;

struct BeginLaunch {
  LaunchedWorld world;
  int op;
  Moved moved[kMaxDeviceRanks];
};

/// One CTA a hosted rank: sees to it that peers have read what was sent before, and notes whose delivery this is.
__global__ void __launch_bounds__(kBeginLanes, 1) begin_ahead(const __grid_constant__ BeginLaunch launch) {
  __shared__ CtaTables tables;
  const CtaOfRank cta = CtaOfRank::of_grid(1);
  CtaPart part(launch.world, tables, cta, 0);
  if (part.begin(launch.op)) {
    part.await_idle_lines(launch.op);
    part.count(threadIdx.x == 0 ? launch.moved[cta.hosted] : Moved{}, launch.op);
    part.note_ahead();
  }
  part.end();
}

struct PostLaunch {
  WindowLayout layout;
  char* const* windows;
  DeviceState* state;
  int rank, op;
  int tokens;  // the first so many have been copied
};

/// Posts the chunks that are whole.
__global__ void __launch_bounds__(kPostLanes) post_ahead(const __grid_constant__ PostLaunch launch) {
  const WindowLayout& layout = launch.layout;
  const int peers = layout.shape.topology.ranks - 1;
  if (launch.state->window.stopped) return;
  const CudaMem mem(launch.windows, 0, launch.rank, launch.state->window);
  Cut cut = pull_cut(layout);
  for (int i = static_cast<int>(threadIdx.x); i < layout.shape.slices * peers; i += kPostLanes) {
    const int to = i % peers, peer = to < launch.rank ? to : to + 1;
    cut.slice = i / peers;
    const int chunks = cut.chunks(launch.tokens);
    if (chunks > 0)
      mem.post(peer, layout.slice_word(ready_word(Channel::pull), cut.slice, launch.rank),
               make_signal(launch.state->ahead, chunks, launch.op));
  }
}

constexpr int kParts[] = {7, 12, 15}, kOf = 16;
constexpr int kMostPieces = static_cast<int>(std::size(kParts)) + 1;

/// Where the pieces of x end. The first is large, since nobody asks for it before the plan is made, and the last small,
/// since somebody waits for it.
std::vector<int> piece_ends(int tokens, const WindowShape& shape) {
  constexpr std::int64_t kWorthCutting = 2 << 20;  // bytes
  std::vector<int> ends;
  if (static_cast<std::int64_t>(tokens) * shape.pull_row_bytes >= kWorthCutting)
    for (const int part : kParts) {
      const int end = tokens / kOf * part / shape.pull_tokens * shape.pull_tokens;  // of a chunk
      if (end > (ends.empty() ? 0 : ends.back())) ends.push_back(end);
    }
  if (tokens > 0) ends.push_back(tokens);
  return ends;
}

/// What comes to `after` from here on waits for what `before` holds.
void join_streams(cudaStream_t before, cudaStream_t after, cudaEvent_t event) {
  cuda_check(cudaEventRecord(event, before), "an event of rows sent ahead");
  cuda_check(cudaStreamWaitEvent(after, event, 0), "waiting for rows sent ahead");
}

}  // namespace

/// The streams beside, and what they need to know of the windows.
class SendAhead::Streams {
 public:
  Streams(const DeviceWorld& world, const std::vector<std::uintptr_t>& windows)
      : world_(world), layout_(world.shape), windows_(windows) {
    int least = 0, first = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &first), "stream priorities");
    for (cudaStream_t* const stream : {&copies_, &posts_})
      cuda_check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, first), "a stream for rows");
    const auto make = [](cudaEvent_t& event) {
      cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event for rows");
    };
    make(started_), make(ended_);
    for (cudaEvent_t& event : copied_) make(event);
  }
  ~Streams() {
    for (const cudaStream_t stream : {copies_, posts_})
      if (stream) cudaStreamDestroy(stream);
    for (const cudaEvent_t event : copied_)
      if (event) cudaEventDestroy(event);
    for (const cudaEvent_t event : {started_, ended_})
      if (event) cudaEventDestroy(event);
  }

  void start(const std::vector<AheadArgs>& args, int op, double seconds, cudaStream_t stream) {
    join(stream);  // of a delivery that never came
    const WindowShape& shape = world_.shape;
    BeginLaunch begin{launched_world(world_, seconds), checked_op(op), {}};
    for (std::size_t i = 0; i < args.size(); ++i) {
      if (args[i].tokens > shape.landed_rows)
        throw Error(std::to_string(args[i].tokens) + " tokens to send ahead: at most " +
                    std::to_string(shape.landed_rows));
      const std::int64_t rows = static_cast<std::int64_t>(args[i].tokens) * (shape.topology.ranks - 1);
      begin.moved[i] = {rows, rows * shape.pull_row_bytes, 0, 0};
    }
    begin_ahead<<<world_.hosted, kBeginLanes, 0, stream>>>(begin);
    cuda_check(cudaGetLastError(), "sending rows ahead");
    if (std::all_of(args.begin(), args.end(), [](const AheadArgs& one) { return one.tokens == 0; })) return;
    is_apart_ = true;
    join_streams(stream, copies_, started_);
    cuda_check(cudaStreamWaitEvent(posts_, started_, 0), "waiting for rows sent ahead");
    try {
      for (int i = 0; i < world_.hosted; ++i) send(i, args[i], op);
    } catch (...) {
      join_streams(copies_, posts_, copied_[0]);  // copies of a piece that is not whole
      throw;
    }
  }
  void join(cudaStream_t stream) {
    if (!is_apart_) return;
    join_streams(posts_, stream, ended_);
    is_apart_ = false;
  }

 private:
  /// Enqueues all pieces of one hosted rank's rows.
  void send(int hosted, const AheadArgs& args, int op) {
    const int me = world_.first_rank + hosted, R = world_.shape.topology.ranks;
    const auto row_bytes = static_cast<std::size_t>(world_.shape.pull_row_bytes);
    int from = 0, piece = 0;
    for (const int end : piece_ends(args.tokens, world_.shape)) {
      const char* const rows = static_cast<const char*>(args.x) + from * row_bytes;
      for (int step = 1; step < R; ++step) {
        const int to = (me + step) % R;
        auto* const there = reinterpret_cast<char*>(windows_[to]) + layout_.landed_row(to, me, from);
        cuda_check(cudaMemcpyAsync(there, rows, (end - from) * row_bytes, cudaMemcpyDefault, copies_),
                   "copying rows ahead");
      }
      join_streams(copies_, posts_, copied_[piece++]);
      const PostLaunch post{layout_,
                            reinterpret_cast<char* const*>(world_.windows),
                            reinterpret_cast<DeviceState*>(world_.states) + hosted,
                            me,
                            op,
                            end};
      post_ahead<<<1, kPostLanes, 0, posts_>>>(post);
      cuda_check(cudaGetLastError(), "posting rows that were sent ahead");
      from = end;
    }
  }

  const DeviceWorld world_;
  const WindowLayout layout_;
  const std::vector<std::uintptr_t> windows_;
  cudaStream_t copies_ = nullptr, posts_ = nullptr;
  cudaEvent_t started_ = nullptr, copied_[kMostPieces] = {}, ended_ = nullptr;
  bool is_apart_ = false;  // not joined yet
};

SendAhead::SendAhead(const DeviceWorld& world, const std::vector<std::uintptr_t>& windows)
    : streams_(std::make_unique<Streams>(world, windows)) {}
SendAhead::~SendAhead() = default;
void SendAhead::start(const std::vector<AheadArgs>& args, int op, double seconds, std::uintptr_t stream) {
  streams_->start(args, op, seconds, reinterpret_cast<cudaStream_t>(stream));
}
void SendAhead::join(std::uintptr_t stream) { streams_->join(reinterpret_cast<cudaStream_t>(stream)); }

}  // namespace flexep
