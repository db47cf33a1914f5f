// The kernel of exchange_two_gpus.cu: both roles of csrc/proto/exchange.h over the TMA ring, between two GPUs.
//
// A slice is a line's words and rings for one writing and one reading team: a whole small window layout, at the same
// place in both GPUs' memory. Teams so share no word, and nothing but the copies goes between the warps of a GPU.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mem/ring.cuh"

namespace flexep {

constexpr int kRowBytes = 14336, kTokens = 4096,
              kRows = kTokens + 64;  // rows of x and of out: more than are used
constexpr int kRowWords = kRowBytes / 8, kPoison = 0xA5, kOp = 7;
constexpr int kMaxSlices = 1024, kMaxThreads = 512;
constexpr int kSharedBytes = 227 * 1024 - 256;  // all that a CTA may have but what is static

enum Mode : int { kPush, kPullRing, kPullRegistered };
constexpr const char* kModeNames[] = {"push", "pull_ring", "pull_registered"};
enum Role : int { kWriter, kReader };

/// What one GPU keeps for one slice: a line's words and rings, used by one writing and one reading team.
struct SliceState {
  WindowState window;
  std::uint32_t
      epoch[2];  // by role: each team advances its own, so no team waits for another to have read it
  Epoch last_used[kChannels * 2];
  std::int32_t status[2];  // by role: how its last operation ended
};

/// How a launch is cut up, and how far a warp runs ahead of the handshake.
struct Shape {
  Mode mode;
  int ctas;
  int warps;            // of each role a CTA, or of a CTA with split roles half as many as it has
  bool split;           // even CTAs write, odd CTAs read; else every CTA does both
  bool cta_teams;       // a role's warps of a CTA are one team with one slice; else every warp has its own
  int stages[2];        // by role; up to `held` of them loaded, the others being stored
  int held[2];          // by role
  int chunk, slots;     // tokens a chunk, chunks a ring
  int late = 0;         // a chunk is announced after so many rows of the next were stored; 0: drained at once
  bool look = false;    // a reader loads from the next chunk as soon as it is there; not for teams of a CTA
  bool settles = true;  // a reader's stores are in place before it releases, as proto/exchange.h has it
  double seconds[2] = {2, 2};  // by GPU: deadline of a wait

  __host__ __device__ int role_warps() const { return split ? 2 * warps : warps; }
  __host__ __device__ int slices() const {
    return (split ? ctas / 2 : ctas) * (cta_teams ? 1 : role_warps());
  }
  __host__ __device__ int chunks() const { return kTokens / chunk; }
  __host__ __device__ int slice_rows() const { return chunk / slices(); }  // of a chunk
  __host__ __device__ int warp_rows() const { return slice_rows() / (cta_teams ? role_warps() : 1); }
  bool fits() const {
    const int rings = (split ? 2 : 1) * warps;  // of each kind
    const std::size_t bytes = split ? std::max(ring(0).bytes, ring(1).bytes) : ring(0).bytes + ring(1).bytes;
    return kTokens % chunk == 0 && slices() <= kMaxSlices && chunks() * slices() * warp_rows() > 0 &&
           slices() * slice_rows() == chunk && slice_rows() % warp_rows() == 0 &&
           rings * bytes <= kSharedBytes;
  }
  __host__ __device__ RingLayout ring(int role) const { return {stages[role], kRowBytes}; }
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
  const int* sources[2];    // row of x of each token, [kTokens], by GPU that has x
  const int* destinations;  // row of out of each token that I receive, [kTokens]
  int me;
};

class PlainMem : public CudaMem {
 public:
  __device__ PlainMem(const Job& job, int slice, Role role)
      : CudaMem(job.windows, slice * job.slice.bytes, job.me, job.state[slice].window),
        settles_(role == kWriter || job.shape.settles) {}
  /// For a reader what matters is that its loads are over, and the ring's wait has seen that.
  __device__ void drain() const {
    if (settles_) CudaMem::drain();
  }

 private:
  bool settles_;
};

/// A planted bug: slice 0 of GPU 0 says nothing of any chunk after the second.
class ForgetfulMem : public PlainMem {
 public:
  __device__ ForgetfulMem(const Job& job, int slice, Role role)
      : PlainMem(job, slice, role),
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

/// The rows that one warp moves, 0, 1, 2, ... through all chunks: its part of its slice's part of every chunk. All
/// parts are equal (Shape::fits).
class Rows {
 public:
  __device__ Rows(const Shape& shape, int slice, int warp)
      : a_chunk_(shape.warp_rows()),
        count_(shape.chunks() * a_chunk_),
        chunk_tokens_(shape.chunk),
        first_token_(slice * shape.slice_rows()),
        first_place_(warp * a_chunk_) {}

  __device__ int count() const { return count_; }
  __device__ int begin(int chunk) const { return chunk * a_chunk_; }
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

/// One warp of one team in one of the two roles.
template <class Mem, class Team>
class Mover {
 public:
  __device__ Mover(const Job& job, Exchange<Mem, Team>& exchange, const Ring& ring, int slice, int warp)
      : job_(job),
        shape_(job.shape),
        exchange_(exchange),
        ring_(ring),
        channel_(job.shape.mode == kPush ? Channel::push : Channel::pull),
        line_(Topology::direct(job.me, 1 - job.me)),
        rows_(job.shape, slice, warp) {}

  __device__ Status write() {
    IndexStream sources(job_.sources[job_.me], rows_);
    const auto load = [&](int n) { return job_.rows[job_.me] + offset(sources(n)); };
    int loaded = 0, unannounced = -1, since = 0;  // `since`: stores behind the chunk not announced
    const auto announce = [&] {
      ring_.drain(since);
      exchange_.team().sync();
      exchange_.announce(channel_, line_, unannounced);
      unannounced = -1;
    };
    for (int chunk = 0; chunk < shape_.chunks(); ++chunk) {
      load_until(rows_.count(), loaded, kWriter, load);
      const Status status = exchange_.claim(channel_, line_, chunk);
      if (status != Status::arrived) return status;
      for (int n = rows_.begin(chunk); n < rows_.begin(chunk + 1); ++n) {
        load_until(rows_.count(), loaded, kWriter, load);
        ring_.wait();
        ring_.store(slot(chunk, n), kRowBytes);
        if (++since == shape_.late && unannounced >= 0) announce();
      }
      if (unannounced >= 0) announce();
      unannounced = chunk, since = 0;
      if (shape_.late == 0 || chunk + 1 == shape_.chunks()) announce();
    }
    return Status::arrived;
  }

  /// Rows that lie still are offered at once, and must lie still until they have been read.
  __device__ Status offer_registered(Epoch epoch) {
    Status status = exchange_.claim(channel_, line_, 0);
    if (status != Status::arrived) return status;
    exchange_.ready(channel_, line_, shape_.chunks() - 1);
    Team& team = exchange_.team();
    if (team.rank() == 0)
      status = exchange_.await(free_word(channel_), line_.here, make_signal(epoch + 1, 0, kOp), line_.peer);
    return static_cast<Status>(team.broadcast(static_cast<int>(status)));
  }

  __device__ Status read() {
    IndexStream sources(job_.sources[line_.peer], rows_), targets(job_.destinations, rows_);
    const auto load = [&](int n) { return offered(n, sources); };
    int loaded = 0, arrived = 0;
    for (int chunk = 0; chunk < shape_.chunks(); ++chunk) {
      if (arrived <= chunk) {
        const Status status = exchange_.arrive(channel_, line_, chunk);
        if (status != Status::arrived) return status;
        arrived = chunk + 1;
      }
      for (int n = rows_.begin(chunk); n < rows_.begin(chunk + 1); ++n) {
        load_until(rows_.begin(arrived), loaded, kReader, load);
        if (may_look(loaded, arrived) && has_arrived(arrived)) {
          const Status status = exchange_.arrive(channel_, line_, arrived);
          if (status != Status::arrived) return status;
          load_until(rows_.begin(++arrived), loaded, kReader, load);
        }
        ring_.wait();
        ring_.store(job_.out + offset(targets(n)), kRowBytes);
      }
      const bool last = chunk + 1 == shape_.chunks();
      if (last || shape_.mode != kPullRegistered) exchange_.release(channel_, line_, chunk, last);
    }
    return Status::arrived;
  }

  /// Nothing is in flight when a CTA ends.
  __device__ void finish() { ring_.abandon(); }

 private:
  __device__ static std::size_t offset(int row) { return static_cast<std::size_t>(row) * kRowBytes; }

  template <class From>
  __device__ void load_until(int end, int& loaded, Role role, From from) {
    for (; loaded < end && ring_.held() < shape_.held[role]; ++loaded) {
      ring_.acquire();
      ring_.load(from(loaded), kRowBytes);
    }
  }

  __device__ char* slot(int chunk, int n) const {
    const WindowLayout& layout = exchange_.layout();
    return shape_.mode == kPush
               ? exchange_.mem().address(line_.peer, layout.push_row(line_.there, chunk, rows_.place(n)))
               : exchange_.mem().address(job_.me, layout.pull_row(chunk, rows_.place(n)));
  }
  __device__ const void* offered(int n, IndexStream& sources) const {
    if (shape_.mode == kPullRegistered) return job_.rows[line_.peer] + offset(sources(n));
    const WindowLayout& layout = exchange_.layout();
    const int chunk = rows_.chunk(n), place = rows_.place(n);
    return shape_.mode == kPush
               ? exchange_.mem().view(job_.me, layout.push_row(line_.here, chunk, place), kRowBytes)
               : exchange_.mem().view(line_.peer, layout.pull_row(chunk, place), kRowBytes);
  }

  /// Whether a stage waits for rows of a chunk that has not arrived.
  __device__ bool may_look(int loaded, int arrived) const {
    return shape_.look && arrived < shape_.chunks() && loaded == rows_.begin(arrived) &&
           ring_.held() < shape_.held[kReader];
  }
  __device__ bool has_arrived(int chunk) const {
    int there = 0;
    if (exchange_.team().rank() == 0)
      there = has_reached(exchange_.mem().load(exchange_.layout().word(ready_word(channel_), line_.here)),
                          exchange_.signal(chunk + 1));
    return exchange_.team().broadcast(there) != 0;
  }

  const Job& job_;
  const Shape& shape_;
  Exchange<Mem, Team>& exchange_;
  Ring ring_;
  const Channel channel_;
  const Line line_;
  const Rows rows_;
};

template <class Mem, class Team>
__device__ void play(const Job& job, Role role, int slice, Team& team, const Ring& ring, int warp) {
  SliceState& state = job.state[slice];
  const Epoch epoch = state.epoch[role] + 1;
  team.sync();  // everybody has read it before the leader advances it
  Mem mem(job, slice, role);
  Exchange<Mem, Team> exchange(mem, team, job.slice,
                               {job.me, epoch, kOp, state.last_used, job.shape.seconds[job.me]});
  Mover<Mem, Team> mover(job, exchange, ring, slice, warp);
  const Status status = role == kReader                     ? mover.read()
                        : job.shape.mode == kPullRegistered ? mover.offer_registered(epoch)
                                                            : mover.write();
  mover.finish();
  if (team.rank() == 0) {
    state.status[role] = static_cast<std::int32_t>(status);
    state.epoch[role] = epoch;
  }
}

template <class Mem>
__global__ void __launch_bounds__(kMaxThreads, 1) exchange_rows(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int said[2];
  const Shape& shape = job.shape;
  const int warps = shape.role_warps(), me = static_cast<int>(threadIdx.x) / 32;
  const int cta = static_cast<int>(blockIdx.x);
  const Role role = (shape.split ? cta % 2 : me / warps) ? kReader : kWriter;
  const int warp = me % warps, group = shape.split ? cta / 2 : cta;
  const std::size_t before = shape.split || role == kWriter ? 0 : warps * shape.ring(kWriter).bytes;
  const Ring ring(shape.ring(role), shared + before + warp * shape.ring(role).bytes);
  if (shape.cta_teams) {
    Warps team(me - warp, warps, 1 + role, &said[role]);
    play<Mem>(job, role, group, team, ring, warp);
  } else {
    Warp team;
    play<Mem>(job, role, group * warps + warp, team, ring, 0);
  }
}

__device__ std::uint64_t value_of(std::uint32_t seed, int gpu, int row, int word) {
  std::uint64_t z = (static_cast<std::uint64_t>(seed) << 40) ^ (static_cast<std::uint64_t>(gpu) << 36) ^
                    (static_cast<std::uint64_t>(row) << 16) ^ static_cast<std::uint64_t>(word);
  z = (z + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  return z ^ (z >> 29);
}

__global__ void fill_rows(std::uint64_t* x, std::uint32_t seed, int gpu) {
  const int row = static_cast<int>(blockIdx.x);
  for (int w = static_cast<int>(threadIdx.x); w < kRowWords; w += static_cast<int>(blockDim.x))
    x[static_cast<std::size_t>(row) * kRowWords + w] = value_of(seed, gpu, row, w);
}

/// Counts the words of out that are not what they must be. `expected`: the peer's row in each row of out, -1: poison.
__global__ void check_rows(const std::uint64_t* out, const int* expected, std::uint32_t seed, int peer,
                           unsigned long long* wrong) {
  const int row = static_cast<int>(blockIdx.x), source = expected[row];
  unsigned long long count = 0;
  for (int w = static_cast<int>(threadIdx.x); w < kRowWords; w += static_cast<int>(blockDim.x)) {
    const std::uint64_t want = source < 0 ? kPoison * 0x0101010101010101ull : value_of(seed, peer, source, w);
    count += out[static_cast<std::size_t>(row) * kRowWords + w] != want;
  }
  if (count > 0) atomicAdd(wrong, count);
}

}  // namespace flexep
