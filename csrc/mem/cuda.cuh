// The device's Mem: windows of GPUs that load and store each other's memory. What it promises is in proto/exchange.h.
// Below are the instructions, one function each, named by what they do, in which order and in which scope; then the
// team that a warp is. Rows travel by the copy engine of an SM (TMA, the "async proxy"): see mem/ring.cuh.
//
// Where the generic and the async proxy meet:
//   acquire, then bulk copy     `load` fences after its acquire: credits guard bulk stores, arrivals guard bulk loads
//   bulk copy, then release     a bulk copy that is seen complete (`drain`, mbarrier) has fenced by itself
//   kernel before, bulk copy    the kernel boundary
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/team.h"
#include "proto/exchange.h"
#include "proto/state.h"

namespace flexep {

namespace ptx {

__device__ __forceinline__ std::uint64_t ld_acquire_sys(const void* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ std::uint64_t ld_relaxed_sys(const void* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word));
  return value;
}

__device__ __forceinline__ void st_release_sys(void* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint32_t exchange_relaxed_gpu(std::uint32_t* word, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

/// What this thread has seen or done in global memory is before its team's bulk copies to and from global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// What this thread has done in its CTA's shared memory is before bulk copies out of it, by whoever meets it.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// An mbarrier that this thread made is one for the async proxy too.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

/// Atomic operations, though an aligned word would do: tools that look for races know them as such.
__device__ __forceinline__ int or_acquire_cta_shared(const int* word) {
  int value;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(shared_address(word))
               : "memory");
  return value;
}

__device__ __forceinline__ void exchange_release_cta_shared(int* word, int value) {
  asm volatile("{\n.reg .b32 before;\natom.release.cta.shared::cta.exch.b32 before, [%0], %1;\n}" ::"r"(
                   shared_address(word)),
               "r"(value)
               : "memory");
}

__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx_release_cta(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

/// One of the arrivals that the barrier waits for.
__device__ __forceinline__ void mbarrier_arrive_release_cta(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// Whether the phase of that parity is over; sleeps a moment before it says no.
__device__ __forceinline__ bool mbarrier_try_wait_parity_acquire_cta(std::uint64_t* barrier, int parity) {
  std::uint32_t over;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

/// The same, and says so at once.
__device__ __forceinline__ bool mbarrier_test_wait_parity_acquire_cta(std::uint64_t* barrier, int parity) {
  std::uint32_t over;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

/// Whole warps of a CTA, `threads` in all, meet at barrier `id`, which is 1 to 15: 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Global to shared; the barrier counts the bytes. Addresses and `bytes` are multiples of 16, here and below.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Global memory, a peer's too, that is evicted first: by a predicate and not behind a branch, so that a row of such
/// stores is sent one right after the other.
__device__ __forceinline__ void store_streaming_if(bool is, char* to, uint4 vector) {
  asm volatile(
      "{\n.reg .pred is;\nsetp.ne.b32 is, %0, 0;\n@is st.global.cs.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
          static_cast<int>(is)),
      "l"(to), "r"(vector.x), "r"(vector.y), "r"(vector.z), "r"(vector.w)
      : "memory");
}
__device__ __forceinline__ void store_streaming_if(bool is, char* to, uint2 vector) {
  asm volatile("{\n.reg .pred is;\nsetp.ne.b32 is, %0, 0;\n@is st.global.cs.v2.b32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<int>(is)),
               "l"(to), "r"(vector.x), "r"(vector.y)
               : "memory");
}

/// Shared to global, in this thread's open group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// What kPending leaves out is in place, at the peer too.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Calls wait(std::integral_constant) of a number of groups, which an instruction wants as a constant. More than four
/// count as four, so that more is waited for.
template <class Wait>
__device__ __forceinline__ void with_pending(int pending, const Wait& wait) {
  switch (pending) {
    case 0:
      return wait(std::integral_constant<int, 0>{});
    case 1:
      return wait(std::integral_constant<int, 1>{});
    case 2:
      return wait(std::integral_constant<int, 2>{});
    case 3:
      return wait(std::integral_constant<int, 3>{});
    default:
      return wait(std::integral_constant<int, 4>{});
  }
}

/// All groups of this thread but the youngest `pending` are in place.
__device__ __forceinline__ void bulk_wait_group(int pending) {
  with_pending(pending, [](auto most) { bulk_wait_group<decltype(most)::value>(); });
}

/// All but the youngest `pending` have read their shared memory.
__device__ __forceinline__ void bulk_wait_group_read(int pending) {
  with_pending(pending, [](auto most) { bulk_wait_group_read<decltype(most)::value>(); });
}

__device__ __forceinline__ std::int64_t globaltimer_nanoseconds() {
  std::int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace ptx

/// One object serves one lane. `windows`: every rank's window as this GPU maps it, [ranks]. `at`: where, in each of
/// them, the slice of this team's line begins. `state` is that slice's and this rank's, in this GPU's memory.
class CudaMem {
 public:
  __device__ CudaMem(char* const* windows, std::size_t at, int rank, WindowState& state)
      : windows_(windows), at_(at), rank_(rank), state_(state) {}

  /// Where rows go to and come from: for the ring, which moves them.
  __device__ char* address(int rank, std::size_t at) const { return windows_[rank] + at_ + at; }

  /// A few words by ordinary stores: multiples of 4. Rows go by the ring, to an `address`.
  __device__ void put(int to, std::size_t at, const void* from, std::size_t bytes) const {
    auto* there = reinterpret_cast<std::uint32_t*>(address(to, at));
    for (std::size_t i = 0; i < bytes / sizeof *there; ++i) {
      std::uint32_t four;
      memcpy(&four, static_cast<const char*>(from) + i * sizeof four, sizeof four);
      there[i] = four;
    }
  }
  __device__ const void* view(int from, std::size_t at, std::size_t) const { return address(from, at); }
  __device__ void drain() const { ptx::bulk_wait_group(0); }
  __device__ void post(int to, std::size_t at, Signal signal) const {
    ptx::st_release_sys(address(to, at), signal);
  }
  __device__ void put_then_post(int to, std::size_t at, const void* from, std::size_t bytes,
                                std::size_t word_at, Signal signal) const {
    put(to, at, from, bytes);
    drain();
    post(to, word_at, signal);
  }
  __device__ Signal load(std::size_t at) const {
    const Signal signal = ptx::ld_acquire_sys(address(rank_, at));
    ptx::fence_proxy_async_global();
    return signal;
  }
  /// Watches the word for a while, in no order with anything: an acquire empties the SM's first cache, which the warps
  /// beside this one use. Then it reads the clock and has the stop words looked at.
  __device__ Idle idle(std::size_t at, Signal seen, Clock& clock) const {
    for (std::uint32_t look = 0; look < kLooks; ++look)
      if (ptx::ld_relaxed_sys(address(rank_, at)) != seen) return Idle::again;
    const std::int64_t now = ptx::globaltimer_nanoseconds();
    if (clock.began == 0) clock.began = now;
    const double waited = static_cast<double>(now - clock.began) * 1e-9;
    return waited > clock.seconds ? Idle::expired : Idle::look_around;
  }
  __device__ bool stop_once() const { return ptx::exchange_relaxed_gpu(&state_.stopped, 1) == 0; }

 private:
  static constexpr std::uint32_t kLooks = 128;  // between two readings of the clock and the stop words

  char* const* windows_;
  std::size_t at_;
  int rank_;
  WindowState& state_;
};

/// The lanes of a warp. They call together.
struct Warp {
  __device__ int rank() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int size() const { return 32; }
  __device__ void sync() const { __syncwarp(); }
  /// A shuffle orders no memory: the sync does.
  __device__ int broadcast(int value) const {
    value = __shfl_sync(0xffffffffu, value, 0);
    __syncwarp();
    return value;
  }
};

/// A count in shared memory: one lane sets it, warps of the CTA watch it. Who has seen a value has seen what the setter
/// had seen and done before, its bulk copies too where it had seen them complete.
class CtaCount {
 public:
  __device__ void set(int value) { ptx::exchange_release_cta_shared(&value_, value); }
  __device__ int get() const { return ptx::or_acquire_cta_shared(&value_); }

 private:
  int value_;
};

}  // namespace flexep
