// The kernel of exchange_two_gpus.cu: both roles of csrc/proto/exchange.h over the TMA ring, between two GPUs.
//
// A CTA has warps that move rows and, for each role that it plays, two that speak for them. The waiter claims (or
// arrives) and tells the movers how many chunks they may touch; the poster announces (or releases) what they have done.
// Only a missing chunk or credit holds up a mover, never a look or a post. The exchange's team is one warp.
//
// A slice is what one writing and one reading CTA share: a line's words and rings, as a small window layout of its
// own, at the same place in both GPUs' memory. So every word keeps one writer and one reader with any number of CTAs.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mem/ring.cuh"

namespace flexep {

constexpr int kRowBytes = 14336, kMaxTokens = 16384;
constexpr int kRows = kMaxTokens + 64;  // rows of x and of out: more than are ever used
constexpr int kRowWords = kRowBytes / 8, kPoison = 0xA5, kOp = 7;
constexpr int kMaxSlices = 64, kMaxMovers = 16, kSpeakers = 4, kMaxThreads = 640;
constexpr int kSharedBytes = 227 * 1024 - 512;  // what a CTA may have beside what is static

enum Mode : int { kPush, kPullRing, kPullRegistered };
constexpr const char* kModeNames[] = {"push", "pull_ring", "pull_registered"};
enum Role : int { kWriter, kReader };

/// What one GPU keeps for one slice.
struct SliceState {
  WindowState window;
  Epoch epoch[2];  // by role: each CTA of a slice advances its own, and none waits for the other
  Epoch last_used[kChannels * 2];
  std::int32_t status[2];  // by role: how its last operation ended
};

/// How a launch is cut up.
struct Shape {
  Mode mode;
  int ctas;
  bool split;     // even CTAs write, odd CTAs read; else every CTA does both
  int movers;     // warps that move rows, of each role a CTA; of a CTA with one role half as many as it has
  int stages[2];  // of a mover, by role; up to `held` of them loaded, the others being stored
  int held[2];    // by role
  int chunk, slots;  // tokens a chunk, chunks a ring
  int late;  // rows that a writer stores behind a chunk before it looks whether that is in place: 1 to 4
  int tokens = 4096;           // that each GPU sends
  double seconds[2] = {2, 2};  // by GPU: deadline of a wait

  __host__ __device__ int role_movers() const { return split ? 2 * movers : movers; }
  __host__ __device__ int slices() const { return split ? ctas / 2 : ctas; }
  __host__ __device__ int chunks() const { return tokens / chunk; }
  __host__ __device__ int slice_rows() const { return chunk / slices(); }              // of a chunk
  __host__ __device__ int mover_rows() const { return slice_rows() / role_movers(); }  // of a chunk
  __host__ __device__ int threads() const { return 32 * (2 * movers + kSpeakers); }
  __host__ __device__ RingLayout ring(int role) const { return {stages[role], kRowBytes}; }
  bool fits() const {
    const std::size_t both = ring(0).bytes + ring(1).bytes, larger = std::max(ring(0).bytes, ring(1).bytes);
    return tokens == chunks() * chunk && tokens <= kMaxTokens && slices() <= kMaxSlices &&
           role_movers() <= kMaxMovers && mover_rows() > 0 &&
           slices() * role_movers() * mover_rows() == chunk &&
           movers * (split ? 2 * larger : both) <= kSharedBytes;
  }
  WindowLayout slice() const {
    const int rows = slice_rows();
    const bool push = mode == kPush, pull = mode == kPullRing;
    return WindowLayout({{2, 2}, slots, pull ? rows : 0, push ? rows : 0, kRowBytes, kRowBytes, 0, 0, 0});
  }
};

/// Arguments of the kernel: the same for every launch of a shape.
struct Job {
  Shape shape;
  WindowLayout slice;
  char* windows[2];         // [slices] slices each, by GPU
  const char* rows[2];      // x, [kRows][kRowBytes], by GPU; registered: the peer may read it
  SliceState* state;        // [slices]
  char* out;                // [kRows][kRowBytes]
  const int* sources[2];    // row of x of each token, [kMaxTokens], by GPU that has x
  const int* destinations;  // row of out of each token that I receive, [kMaxTokens]
  int me;
};

struct PlainMem : CudaMem {
  __device__ PlainMem(const Job& job, int slice)
      : CudaMem(job.windows, slice * job.slice.bytes, job.me, job.state[slice].window) {}
};

/// A planted bug: slice 0 of GPU 0 says nothing of any chunk after the second.
class ForgetfulMem : public PlainMem {
 public:
  __device__ ForgetfulMem(const Job& job, int slice)
      : PlainMem(job, slice),
        ready_(job.slice.word(ready_word(job.shape.mode == kPush ? Channel::push : Channel::pull), 0)),
        forgets_(job.me == 0 && slice == 0) {}
  __device__ void post(int to, std::size_t at, Signal signal) const {
    if (forgets_ && to == 1 && at == ready_ && chunks_of(signal) > 2) return;
    PlainMem::post(to, at, signal);
  }

 private:
  std::size_t ready_;
  bool forgets_;
};

/// What the warps of a CTA tell each other, by role.
struct Progress {
  CtaCount granted[2];            // chunks that the movers may touch, or kStop; set by the waiter
  CtaCount moved[2][kMaxMovers];  // chunks that a mover is done with; set by that mover
  static constexpr int kStop = -1;
};

/// The rows that one mover moves, 0, 1, 2, ... through all chunks: its part of its slice's part of every chunk.
class Rows {
 public:
  __device__ Rows(const Shape& shape, int slice, int mover)
      : a_chunk_(shape.mover_rows()),
        count_(shape.chunks() * a_chunk_),
        chunk_tokens_(shape.chunk),
        first_token_(slice * shape.slice_rows()),
        first_place_(mover * a_chunk_) {}

  __device__ int count() const { return count_; }
  __device__ int a_chunk() const { return a_chunk_; }
  __device__ int chunk(int n) const { return n / a_chunk_; }
  /// Where the row lies in its chunk's slot.
  __device__ int place(int n) const { return first_place_ + n % a_chunk_; }
  __device__ int token(int n) const { return chunk(n) * chunk_tokens_ + first_token_ + place(n); }

 private:
  int a_chunk_, count_, chunk_tokens_, first_token_, first_place_;
};

/// list[token of row n] for n = 0, 1, 2, ..., fetched by all lanes of a warp 32 rows ahead.
class IndexStream {
 public:
  __device__ IndexStream(const int* list, const Rows& rows) : list_(list), rows_(rows), next_(fetch(0)) {}
  __device__ int operator()(int n) {
    if (n % 32 == 0) now_ = next_, next_ = fetch(n + 32);
    return __shfl_sync(0xffffffffu, now_, n % 32);
  }

 private:
  __device__ int fetch(int first) const {
    const int n = first + Warp{}.rank();
    return n < rows_.count() ? list_[rows_.token(n)] : 0;
  }

  const int* list_;
  const Rows& rows_;
  int now_ = 0, next_;
};

/// One warp that moves rows, in one of the two roles.
template <class Mem>
class Mover {
 public:
  __device__ Mover(const Job& job, Role role, int slice, int mover, Progress& progress, const Ring& ring)
      : job_(job),
        role_(role),
        push_(job.shape.mode == kPush),
        line_(Topology::direct(job.me, 1 - job.me)),
        mem_(job, slice),
        rows_(job.shape, slice, mover),
        granted_(progress.granted[role]),
        moved_(progress.moved[role][mover]),
        ring_(ring) {}

  /// Reads out of x, stores into the ring of the line.
  __device__ void write() {
    IndexStream sources(job_.sources[job_.me], rows_);
    const auto load = [&](int n) { return job_.rows[job_.me] + offset(sources(n)); };
    const int late = job_.shape.late;
    for (int n = 0; n < rows_.count(); ++n) {
      load_until(rows_.count(), load);
      if (!may_touch(n)) {
        report_stored(n, 0);  // whom we wait for may wait for these
        if (!wait_to_touch(n)) return;
      }
      ring_.wait();
      ring_.store(slot(n), kRowBytes);
      if (n >= late && (n + 1 - late) % rows_.a_chunk() == 0) report_stored(n + 1, late);
    }
    report_stored(rows_.count(), 0);
  }

  /// Reads out of the ring of the line, or out of registered rows, stores into out.
  __device__ void read() {
    IndexStream sources(job_.sources[line_.peer], rows_), targets(job_.destinations, rows_);
    const auto load = [&](int n) { return offered(n, sources); };
    for (int n = 0; n < rows_.count(); ++n) {
      if (!may_touch(n) && !wait_to_touch(n)) return;
      load_until(min(chunks_granted_ * rows_.a_chunk(), rows_.count()), load);
      ring_.wait();
      if ((n + 1) % rows_.a_chunk() == 0)
        report((n + 1) / rows_.a_chunk());  // read: that is all the writer asks
      ring_.store(job_.out + offset(targets(n)), kRowBytes);
    }
  }

  /// Nothing is in flight when a CTA ends.
  __device__ void finish() { ring_.abandon(); }

 private:
  __device__ static std::size_t offset(int row) { return static_cast<std::size_t>(row) * kRowBytes; }

  template <class From>
  __device__ void load_until(int end, From from) {
    for (; loaded_ < end && ring_.held() < job_.shape.held[role_]; ++loaded_) {
      ring_.acquire();
      ring_.load(from(loaded_), kRowBytes);
    }
  }

  __device__ bool may_touch(int n) {
    const int chunk = rows_.chunk(n);
    if (chunks_granted_ <= chunk || role_ == kReader) chunks_granted_ = Warp{}.broadcast(granted_.get());
    return chunks_granted_ > chunk;
  }
  /// The waiter's deadline bounds this. False: the waiter has given up.
  __device__ bool wait_to_touch(int n) {
    while (!may_touch(n))
      if (chunks_granted_ == Progress::kStop) return false;
    return true;
  }

  /// Of `stored` rows all but the youngest `pending` must be in place.
  __device__ void report_stored(int stored, int pending) {
    ring_.drain(pending);
    report((stored - pending) / rows_.a_chunk());
  }
  __device__ void report(int chunks) {
    if (Warp{}.rank() == 0) moved_.set(chunks);
  }

  __device__ char* slot(int n) const {
    const int chunk = rows_.chunk(n), place = rows_.place(n);
    return push_ ? mem_.address(line_.peer, job_.slice.push_row(line_.there, chunk, place))
                 : mem_.address(job_.me, job_.slice.pull_row(chunk, place));
  }
  __device__ const void* offered(int n, IndexStream& sources) const {
    if (job_.shape.mode == kPullRegistered) return job_.rows[line_.peer] + offset(sources(n));
    const int chunk = rows_.chunk(n), place = rows_.place(n);
    return push_ ? mem_.view(job_.me, job_.slice.push_row(line_.here, chunk, place), kRowBytes)
                 : mem_.view(line_.peer, job_.slice.pull_row(chunk, place), kRowBytes);
  }

  const Job& job_;
  const Role role_;
  const bool push_;
  const Line line_;
  const Mem mem_;
  const Rows rows_;
  CtaCount &granted_, &moved_;
  Ring ring_;
  int loaded_ = 0, chunks_granted_ = 0;
};

/// The two warps that speak for the movers of a role.
template <class Mem>
class Speaker {
 public:
  __device__ Speaker(const Job& job, Role role, int slice, Progress& progress, Epoch epoch)
      : job_(job),
        role_(role),
        channel_(job.shape.mode == kPush ? Channel::push : Channel::pull),
        line_(Topology::direct(job.me, 1 - job.me)),
        mem_(job, slice),
        exchange_(mem_, team_, job.slice,
                  {job.me, epoch, kOp, job.state[slice].last_used, job.shape.seconds[job.me]}),
        granted_(progress.granted[role]),
        moved_(progress.moved[role]) {}

  __device__ Status wait() {
    Status status = Status::arrived;
    for (int chunk = 0; chunk < job_.shape.chunks() && status == Status::arrived; ++chunk) {
      status = role_ == kWriter ? exchange_.claim(channel_, line_, chunk)
                                : exchange_.arrive(channel_, line_, chunk);
      if (team_.rank() == 0) granted_.set(status == Status::arrived ? chunk + 1 : Progress::kStop);
    }
    return status;
  }

  /// Several chunks that are done meanwhile take one post: a later one says all that an earlier one would have said.
  __device__ void post() {
    const int chunks = job_.shape.chunks();
    for (int posted = 0; posted < chunks;) {
      const int done = least_moved();
      if (done > posted) {
        posted = done;
        exchange_.settle();
        if (role_ == kWriter)
          exchange_.announce(channel_, line_, done - 1);
        else if (job_.shape.mode != kPullRegistered || done == chunks)
          exchange_.release(channel_, line_, done - 1, done == chunks);
      } else if (team_.broadcast(granted_.get()) == Progress::kStop) {
        return;
      }
    }
  }

  /// Rows that lie still are offered at once, and must lie still until they have been read.
  __device__ Status offer_registered() {
    const Status status = exchange_.claim(channel_, line_, 0);
    if (status != Status::arrived) return status;
    exchange_.settle();
    exchange_.announce(channel_, line_, job_.shape.chunks() - 1);
    return exchange_.emptied(channel_, line_);
  }

 private:
  __device__ int least_moved() const {
    const int lane = team_.rank();
    const int mine = lane < job_.shape.role_movers() ? moved_[lane].get() : job_.shape.chunks();
    const int least = __reduce_min_sync(0xffffffffu, mine);
    team_.sync();
    return least;
  }

  const Job& job_;
  const Role role_;
  const Channel channel_;
  const Line line_;
  Mem mem_;
  Warp team_;
  Exchange<Mem, Warp> exchange_;
  CtaCount& granted_;
  CtaCount* moved_;
};

template <class Mem>
__device__ void speak(const Job& job, Role role, bool waits, int slice, Progress& progress, Epoch epoch) {
  Speaker<Mem> speaker(job, role, slice, progress, epoch);
  const bool registered = role == kWriter && job.shape.mode == kPullRegistered;
  if (waits) {
    const Status status = registered ? speaker.offer_registered() : speaker.wait();
    if (Warp{}.rank() == 0) {
      job.state[slice].status[role] = static_cast<std::int32_t>(status);
      job.state[slice].epoch[role] = epoch;
    }
  } else if (!registered) {
    speaker.post();
  }
}

template <class Mem>
__global__ void __launch_bounds__(kMaxThreads, 1) exchange_rows(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Progress progress;
  const Shape& shape = job.shape;
  const int cta = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32;
  const int slice = shape.split ? cta / 2 : cta, speaker = warp - 2 * shape.movers;
  const Role other = shape.split ? static_cast<Role>(cta % 2) : kReader;  // the role of the later warps
  const Role first = shape.split ? other : kWriter;
  if (warp == 0 && threadIdx.x < 2) {
    progress.granted[threadIdx.x].set(0);
    for (CtaCount& moved : progress.moved[threadIdx.x]) moved.set(0);
  }
  const Role role = speaker < 0 ? (warp < shape.movers ? first : other) : (speaker < 2 ? first : other);
  const Epoch epoch = job.state[slice].epoch[role] + 1;
  __syncthreads();  // everybody has read the epoch before a waiter advances it
  if (speaker >= 0) {
    if (!shape.split || speaker < 2) speak<Mem>(job, role, speaker % 2 == 0, slice, progress, epoch);
    return;
  }
  const int mover = shape.split ? warp : warp % shape.movers;
  const std::size_t before = first == other || role == kWriter ? 0 : shape.movers * shape.ring(kWriter).bytes;
  Mover<Mem> rows(job, role, slice, mover, progress,
                  Ring(shape.ring(role), shared + before + mover * shape.ring(role).bytes));
  if (role == kReader)
    rows.read();
  else if (shape.mode != kPullRegistered)
    rows.write();
  rows.finish();
}

}  // namespace flexep
