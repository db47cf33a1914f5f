#include "kernels/device_ahead.h"

#include <algorithm>
#include <iterator>

#include "base/cuda_check.h"
#include "kernels/chunks.h"
#include "kernels/device_part.cuh"

namespace flexep {
namespace {

constexpr int kBeginLanes = 1024, kPostLanes = 128;

template <int kRanks>
struct BeginLaunch {
  LaunchedWorld world;
  int op;
  Moved moved[kRanks];
};

/// One CTA a hosted rank: sees to it that peers have read what was sent before, and notes whose delivery this is.
template <int kRanks>
__global__ void __launch_bounds__(kBeginLanes, 1)
    begin_ahead(const __grid_constant__ BeginLaunch<kRanks> launch) {
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

/// The copies and posts of one hosted rank with so many tokens, as a graph: one call of the driver instead of four a
/// piece. To be sent again with another x.
class Recording {
 public:
  Recording(const AheadArgs& args, int op, int priority)
      : first_x_(static_cast<const char*>(args.x)),
        tokens_(args.tokens),
        op_(op),
        priority_(priority),
        x_(first_x_) {
    cuda_check(cudaGraphCreate(&graph_, 0), "a graph of rows");
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() {  // one that still runs is freed by the driver when it ends
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
  }

  bool is_of(int tokens, int op) const { return tokens_ == tokens && op_ == op; }

  /// Behind the copy before.
  void copy(void* to, const void* from, std::size_t bytes) {
    Copy one{nullptr, to, static_cast<const char*>(from) - first_x_, bytes};
    const cudaGraphNode_t* const before = copies_.empty() ? nullptr : &copies_.back().node;
    cuda_check(cudaGraphAddMemcpyNode1D(&one.node, graph_, before, before ? 1 : 0, to, from, bytes,
                                        cudaMemcpyDefault),
               "a copy in a graph of rows");
    copies_.push_back(one);
  }
  /// Behind the copies so far and the post before: a word never goes back.
  void post(PostLaunch launch) {
    void* params[] = {&launch};
    cudaKernelNodeParams kernel{};
    kernel.func = reinterpret_cast<void*>(&post_ahead), kernel.kernelParams = params;
    kernel.gridDim = dim3(1), kernel.blockDim = dim3(kPostLanes);
    std::vector<cudaGraphNode_t> before;
    if (!copies_.empty()) before.push_back(copies_.back().node);
    if (post_) before.push_back(post_);
    cuda_check(cudaGraphAddKernelNode(&post_, graph_, before.data(), before.size(), &kernel),
               "a post in a graph of rows");
    cudaKernelNodeAttrValue value{};
    value.priority = priority_;
    cuda_check(cudaGraphKernelNodeSetAttribute(post_, cudaLaunchAttributePriority, &value),
               "the priority of a post");
  }
  void end() { cuda_check(cudaGraphInstantiate(&exec_, graph_, 0), "a graph of rows"); }

  void launch(const void* x, cudaStream_t stream) {
    const char* const rows = static_cast<const char*>(x);
    if (rows != x_) {
      x_ = nullptr;  // that of some copies, until all have it
      for (const Copy& one : copies_)
        cuda_check(cudaGraphExecMemcpyNodeSetParams1D(exec_, one.node, one.to, rows + one.offset, one.bytes,
                                                      cudaMemcpyDefault),
                   "a copy in a graph of rows");
      x_ = rows;
    }
    cuda_check(cudaGraphLaunch(exec_, stream), "sending rows ahead");
  }

 private:
  struct Copy {
    cudaGraphNode_t node;
    void* to;
    std::ptrdiff_t offset;  // in x
    std::size_t bytes;
  };

  const char* const first_x_;
  const int tokens_, op_, priority_;
  const char* x_;  // that the copies have
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  std::vector<Copy> copies_;
  cudaGraphNode_t post_ = nullptr;  // the last
};

/// The streams beside, and what they need to know of the windows.
class SendAhead::Streams {
 public:
  Streams(const DeviceWorld& world, const std::vector<std::uintptr_t>& windows)
      : world_(world), layout_(world.shape), windows_(windows) {
    int least = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &priority_), "stream priorities");
    for (cudaStream_t* const stream : {&copies_, &posts_})
      cuda_check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, priority_), "a stream for rows");
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
    for (const AheadArgs& one : one_each(world_, args))
      if (one.tokens > shape.landed_rows)
        throw Error(std::to_string(one.tokens) + " tokens to send ahead: at most " +
                    std::to_string(shape.landed_rows));
    with_room(world_.hosted, [&](auto ranks) {
      BeginLaunch<ranks> begin{launched_world(world_, seconds), checked_op(op), {}};
      for (std::size_t i = 0; i < args.size(); ++i) {
        const std::int64_t rows = static_cast<std::int64_t>(args[i].tokens) * (shape.topology.ranks - 1);
        begin.moved[i] = {rows, rows * shape.pull_row_bytes, 0, 0};
      }
      begin_ahead<<<world_.hosted, kBeginLanes, 0, stream>>>(begin);
    });
    cuda_check(cudaGetLastError(), "sending rows ahead");
    if (std::all_of(args.begin(), args.end(), [](const AheadArgs& one) { return one.tokens == 0; })) return;
    is_apart_ = true;
    join_streams(stream, posts_, started_);
    if (send_recorded(args, op, stream)) return;
    cuda_check(cudaStreamWaitEvent(copies_, started_, 0), "waiting for rows sent ahead");
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
  /// Sends by a recording, if that is worth one: of a single hosted rank, and of as many tokens as the last start without
  /// one. Not while the caller's stream is captured: that graph is to hold the copies themselves. Where the driver refuses
  /// a graph none is tried again.
  bool send_recorded(const std::vector<AheadArgs>& args, int op, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream, &capture), "sending rows ahead");
    if (!records_ || capture != cudaStreamCaptureStatusNone || args.size() > 1) return false;
    try {
      Recording* const recording = recorded(args[0], op);
      if (recording) recording->launch(args[0].x, posts_);
      return recording != nullptr;
    } catch (const Error&) {
      (void)cudaGetLastError();  // or the next launch would be blamed for it
      recordings_.clear(), records_ = false;
      return false;
    }
  }
  /// Null until as many tokens have come twice.
  Recording* recorded(const AheadArgs& args, int op) {
    constexpr std::size_t kMostRecordings = 8;
    const auto known = std::find_if(recordings_.begin(), recordings_.end(),
                                    [&](const auto& one) { return one->is_of(args.tokens, op); });
    if (known != recordings_.end()) {
      std::rotate(recordings_.begin(), known, known + 1);  // the last used is the first
      return recordings_.front().get();
    }
    const bool comes_again = last_tokens_ == args.tokens && last_op_ == op;
    last_tokens_ = args.tokens, last_op_ = op;
    if (!comes_again) return nullptr;
    auto made = std::make_unique<Recording>(args, op, priority_);
    each_piece(
        0, args, op, [&](void* to, const void* from, std::size_t bytes) { made->copy(to, from, bytes); },
        [&](const PostLaunch& post) { made->post(post); });
    made->end();
    if (recordings_.size() == kMostRecordings) recordings_.pop_back();
    recordings_.insert(recordings_.begin(), std::move(made));
    return recordings_.front().get();
  }

  /// Enqueues all pieces of one hosted rank's rows.
  void send(int hosted, const AheadArgs& args, int op) {
    int piece = 0;
    each_piece(
        hosted, args, op,
        [&](void* to, const void* from, std::size_t bytes) {
          cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, copies_), "copying rows ahead");
        },
        [&](const PostLaunch& post) {
          join_streams(copies_, posts_, copied_[piece++]);
          post_ahead<<<1, kPostLanes, 0, posts_>>>(post);
          cuda_check(cudaGetLastError(), "posting rows that were sent ahead");
        });
  }

  /// copy(to, from, bytes) of each piece to each peer, then post(launch) of that piece.
  template <class Copy, class Post>
  void each_piece(int hosted, const AheadArgs& args, int op, const Copy& copy, const Post& post) const {
    const int me = world_.first_rank + hosted, R = world_.shape.topology.ranks;
    const auto row_bytes = static_cast<std::size_t>(world_.shape.pull_row_bytes);
    int from = 0;
    for (const int end : piece_ends(args.tokens, world_.shape)) {
      const char* const rows = static_cast<const char*>(args.x) + from * row_bytes;
      for (int step = 1; step < R; ++step) {
        const int to = (me + step) % R;
        auto* const there = reinterpret_cast<char*>(windows_[to]) + layout_.landed_row(to, me, from);
        copy(there, rows, (end - from) * row_bytes);
      }
      post(PostLaunch{layout_, reinterpret_cast<char* const*>(world_.windows),
                      reinterpret_cast<DeviceState*>(world_.states) + hosted, me, op, end});
      from = end;
    }
  }

  const DeviceWorld world_;
  const WindowLayout layout_;
  const std::vector<std::uintptr_t> windows_;
  int priority_ = 0;
  cudaStream_t copies_ = nullptr, posts_ = nullptr;
  cudaEvent_t started_ = nullptr, copied_[kMostPieces] = {}, ended_ = nullptr;
  bool is_apart_ = false;  // not joined yet
  std::vector<std::unique_ptr<Recording>> recordings_;
  bool records_ = true;
  int last_tokens_ = -1, last_op_ = -1;  // of the last start without one
};

SendAhead::SendAhead(const DeviceWorld& world, const std::vector<std::uintptr_t>& windows)
    : streams_(std::make_unique<Streams>(world, windows)) {}
SendAhead::~SendAhead() = default;
void SendAhead::start(const std::vector<AheadArgs>& args, int op, double seconds, std::uintptr_t stream) {
  streams_->start(args, op, seconds, reinterpret_cast<cudaStream_t>(stream));
}
void SendAhead::join(std::uintptr_t stream) { streams_->join(reinterpret_cast<cudaStream_t>(stream)); }

}  // namespace flexep
