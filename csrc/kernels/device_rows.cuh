// Where the device's roles put rows that are placed or pushed as they are, weighted or dotted, where a lane is a warp.
// The same bits as host_rows.h.
#pragma once
#include <cstdint>

#include "kernels/args.h"
#include "kernels/collect.h"
#include "kernels/device_lists.cuh"
#include "mem/zeros.cuh"
#include "ops/rows_vector.cuh"

namespace flexep {

/// Whose rows a warp weights, dots or copies, and where they go.
class DevicePlace {
 public:
  __device__ DevicePlace(const DeliverArgs& args, int ranks)
      : args_(args),
        out_(static_cast<char*>(args.out)),
        rows_(args.arrivals.rows),
        row_bytes_(args.hidden * size_of(args.dtype)),
        received_(args.arrivals.base[ranks]),
        top_k_(args.flat ? 0 : args.arrivals.top_k) {}

  __device__ bool computes() const { return !args_.flat && (args_.weights || args_.dot_with); }
  /// Which row copy `lane` of received row j becomes; -1 if it has fewer, or is none.
  __device__ std::int32_t copy_of(int j) const {
    if (j >= received_) return -1;
    if (top_k_ == 0) return warp_lane() == 0 ? j : -1;
    return warp_lane() < top_k_ ? rows_of(j)[warp_lane()] : -1;
  }
  __device__ char* out_or_null(std::int32_t row) const { return row < 0 ? nullptr : out(row); }

  /// Clears the rows that nothing fills, by bulk stores out of `zeros`: next to those of the rows, ordinary stores
  /// hardly get their turn. Rows are dealt to `warps`, those of all CTAs, like cards: most of them lie side by side,
  /// behind all that are filled.
  __device__ void pad(const Lane& warps, const Zeros& zeros) const {
    for (std::int64_t dealt = warps.rank(); dealt < args_.num_rows; dealt += 32 * warps.size()) {
      const std::int64_t row = dealt + warp_lane() * warps.size();
      const bool empty = row < args_.num_rows && (args_.flat ? row >= received_ : args_.row_src[row] < 0);
      for (unsigned left = __ballot_sync(kAllLanes, empty); left != 0; left &= left - 1) {
        const std::int64_t clear = dealt + (__ffs(left) - 1) * warps.size();
        if (warp_lane() != 0) continue;
        zeros.store(out(clear), row_bytes_);
        if (args_.dot_with) args_.dots[clear] = 0.0f;
      }
    }
    Zeros::drain();
  }

  /// Weights and dots `bytes` of received row j, which lie at `piece` and begin `offset` bytes into it. `sums`: of the
  /// row's dots so far, by slot; pieces come in order and begin at multiples of 128 bytes.
  __device__ void place_piece(int j, const char* piece, int offset, int bytes, float* sums) const {
    for (int k = 0; k < top_k_; ++k) {
      const std::int32_t to = rows_of(j)[k];
      if (to < 0) continue;
      with_dtype(args_.dtype, [&](auto dtype) {
        constexpr DType D = decltype(dtype)::value;
        scale<D>(out(to) + offset, piece, bytes, args_.weights ? args_.weights[to] : 1.0f);
        if (!args_.dot_with) return;
        const char* const other = static_cast<const char*>(args_.dot_with) + to * row_bytes_ + offset;
        sums[k] = dot<D>(sums[k], other, piece, bytes);
        if (offset + bytes == row_bytes_) store_dot(to, sums[k]);
      });
    }
  }

 private:
  __device__ char* out(std::int64_t row) const { return out_ + row * row_bytes_; }
  __device__ const std::int32_t* rows_of(int j) const {
    return rows_ + static_cast<std::int64_t>(j) * top_k_;
  }
  template <DType D>
  __device__ void scale(char* to, const char* from, int bytes, float weight) const {
    for (int i = warp_lane(); i < bytes / kVectorBytes; i += 32) {
      uint4 vector = reinterpret_cast<const uint4*>(from)[i];
      if (!args_.weights) {
        store_vector(to, i, vector);
        continue;
      }
      float x[kVector<D>];
      widen<D>(x, vector);
#pragma unroll
      for (float& value : x) value = weight * value;
      store_packed(to, i, round_to<D>(x));
    }
  }
  /// The order of ops/rows.h: element h adds to lane h % 32, then lanes fold by halves.
  template <DType D>
  __device__ float dot(float sum, const char* a, const char* b, int bytes) const {
    const int elements = bytes / (D == DType::f32 ? 4 : 2);
#pragma unroll 8
    for (int h = warp_lane(); h < elements; h += 32) sum = sum + element<D>(a, h) * element<D>(b, h);
    return sum;
  }
  template <DType D>
  __device__ static float element(const char* row, int h) {
    if constexpr (D == DType::f32) return reinterpret_cast<const float*>(row)[h];
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row)[h];
    return D == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
  __device__ void store_dot(std::int32_t to, float sum) const {
    for (int half = 16; half > 0; half /= 2) sum = sum + __shfl_down_sync(kAllLanes, sum, half);
    if (warp_lane() == 0) args_.dots[to] = canonical(sum);
  }

  const DeliverArgs& args_;
  // What every row needs, by value.
  char* out_;
  const std::int32_t* rows_;
  std::int64_t row_bytes_;
  int received_, top_k_;  // top_k: 0 if flat
};

/// Rows that are only copied: the copy engine stores them out of their stage. Where the next row goes is fetched while
/// this one is under way.
class CopyRows {
 public:
  __device__ CopyRows(const DevicePlace& to, RingWarp<StoreEach>& mover) : to_(to), mover_(mover) {}
  __device__ void expect(int j) { next_copy_ = to_.copy_of(j); }
  /// j: one more than before, or what was expected.
  __device__ void place(int j, const void* row, const void*) {
    const std::int32_t copy = next_copy_;
    expect(j + 1);
    mover_.move(row, to_.out_or_null(copy));
  }

 private:
  const DevicePlace to_;
  RingWarp<StoreEach>& mover_;
  std::int32_t next_copy_ = -1;
};

/// Rows that are weighted or dotted: the warp reads them in their stage.
class ComputeEach {
 public:
  using Place = int;  // the received row
  template <int N>
  using Places = Uniform<Place, N>;

  __device__ explicit ComputeEach(const DevicePlace& to) : to_(to) {}
  __device__ void operator()(Ring& ring, const char* stage, int j, int offset, int bytes) {
    if (offset == 0)
      for (float& sum : sums_) sum = 0.0f;
    to_.place_piece(j, stage, offset, bytes, sums_);
    ring.skip();
  }

 private:
  const DevicePlace& to_;
  float sums_[kMaxTopK];
};
struct ComputeRows {
  RingWarp<ComputeEach>& mover;
  __device__ void expect(int) const {}
  __device__ void place(int j, const void* row, const void*) const { mover.move(row, j); }
};

/// Partial sums that only travel.
struct PushRows {
  const char* y;
  std::int64_t row_bytes;
  RingWarp<StoreEach>& mover;
  __device__ void partial(int j, int, void* to) const {
    mover.move(y + j * row_bytes, warp_lane() == 0 ? static_cast<char*>(to) : nullptr);
  }
};

}  // namespace flexep
