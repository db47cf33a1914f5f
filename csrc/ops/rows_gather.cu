#include "ops/rows_cuda.h"
#include "ops/rows_gather.cuh"
#include "ops/rows_launch.cuh"

namespace flexep {
namespace {

template <class Task>
using Kernel = void (*)(Task);

/// By dtype where rows are scaled, else the copy.
Kernel<GatherTask> gather_kernel_of(DType dtype, bool scaled) {
  if (!scaled) return gather_kernel<DType::u8>;
  return dtype == DType::bf16  ? gather_kernel<DType::bf16>
         : dtype == DType::f16 ? gather_kernel<DType::f16>
                               : gather_kernel<DType::f32>;
}

Kernel<ExpandTask> expand_kernel_of(DType dtype, bool scaled) {
  if (!scaled) return expand_kernel<DType::u8>;
  return dtype == DType::bf16  ? expand_kernel<DType::bf16>
         : dtype == DType::f16 ? expand_kernel<DType::f16>
                               : expand_kernel<DType::f32>;
}

/// out[i] = values[index[i]], +0 where the index is none of [0, values).
struct TakeTask {
  float* out;
  const float* values;
  const std::int32_t* index;
  std::int64_t num_values, count;
};

__global__ void __launch_bounds__(kRowThreads) take_kernel(const TakeTask task) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kRowThreads) + threadIdx.x;
  if (i >= task.count) return;
  const std::int32_t from = __ldg(task.index + i);
  task.out[i] = from >= 0 && from < task.num_values ? __ldg(task.values + from) : 0.0f;
}

}  // namespace

void gather_rows_cuda(void* out, const RowsIn& src, std::int64_t src_rows, const std::int32_t* idx,
                      const float* weights, std::int64_t rows, std::int64_t hidden, std::uintptr_t stream) {
  if (rows == 0) return;
  const int columns = columns_of(hidden, src.dtype);
  const Tiles tiles(rows, columns, kGatherCtas);
  const GatherTask task{
      static_cast<char*>(out), rows_at(src, src_rows), idx, weights, rows, columns, tiles.tile};
  gather_kernel_of(src.dtype, weights != nullptr)<<<tiles.ctas, kRowThreads, 0, stream_of(stream)>>>(task);
  cuda_check(cudaGetLastError(), "gather_rows launch");
}

void expand_rows_cuda(const ExpandArgs& args, std::uintptr_t stream) {
  if (args.rows == 0) return;
  const int columns = columns_of(args.hidden, args.src.dtype);
  // A CTA without a token still zeroes padding.
  const std::int64_t most = kTileSlots / std::max<std::int64_t>(1, args.top_k);
  const Tiles tiles(args.tokens, columns, kExpandCtas, most), padding(args.rows, columns, kExpandCtas);
  const ExpandTask task{static_cast<char*>(args.out),
                        rows_at(args.src, args.tokens),
                        args.row_map,
                        args.row_src,
                        args.weights,
                        args.carried,
                        args.carried_out,
                        args.words,
                        args.words_out,
                        static_cast<int>(args.words_a_row),
                        args.rows,
                        static_cast<int>(args.top_k),
                        columns,
                        tiles.tile};
  expand_kernel_of(
      args.src.dtype,
      args.weights !=
          nullptr)<<<std::max(tiles.ctas, padding.ctas), kRowThreads, 0, stream_of(stream)>>>(task);
  cuda_check(cudaGetLastError(), "expand_rows launch");
}

void take_cuda(float* out, const float* values, std::int64_t num_values, const std::int32_t* index,
               std::int64_t count, std::uintptr_t stream) {
  if (count == 0) return;
  const auto ctas = static_cast<unsigned>(ceil_div<std::int64_t>(count, kRowThreads));
  take_kernel<<<ctas, kRowThreads, 0, stream_of(stream)>>>({out, values, index, num_values, count});
  cuda_check(cudaGetLastError(), "take launch");
}

}  // namespace flexep
