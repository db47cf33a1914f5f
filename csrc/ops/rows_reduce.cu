#include "ops/rows_cuda.h"
#include "ops/rows_launch.cuh"
#include "ops/rows_reduce.cuh"

namespace flexep {
namespace {

static_assert(kMostTerms == kReduceSlots);

using ReduceKernel = void (*)(ReduceTask);

template <DType In, DType Out>
ReduceKernel reduce_kernel_of(bool groups) {
  return groups ? reduce_kernel<In, Out, true> : reduce_kernel<In, Out, false>;
}

template <DType In>
ReduceKernel reduce_kernel_of(DType out_dtype, bool groups) {
  return out_dtype == DType::f32   ? reduce_kernel_of<In, DType::f32>(groups)
         : out_dtype == DType::f16 ? reduce_kernel_of<In, DType::f16>(groups)
                                   : reduce_kernel_of<In, DType::bf16>(groups);
}

ReduceKernel reduce_kernel_of(DType dtype, DType out_dtype, bool groups) {
  return dtype == DType::f32   ? reduce_kernel_of<DType::f32>(out_dtype, groups)
         : dtype == DType::f16 ? reduce_kernel_of<DType::f16>(out_dtype, groups)
                               : reduce_kernel_of<DType::bf16>(out_dtype, groups);
}

}  // namespace

void reduce_rows_cuda(void* out, DType out_dtype, const ReduceArgs& args, std::int64_t src_rows,
                      std::uintptr_t stream) {
  if (args.tokens == 0) return;
  if (args.top_k > kMostTerms) throw Error("reduce_rows takes at most 2048 entries a token on CUDA");
  const int columns = columns_of(args.hidden, args.src.dtype);
  const Tiles tiles(args.tokens, columns, kReduceCtas, kReduceSlots / std::max<std::int64_t>(1, args.top_k));
  const ReduceTask task{static_cast<char*>(out),
                        rows_at(args.src, src_rows),
                        args.idx,
                        args.weights,
                        args.groups,
                        args.group_dtype,
                        args.sort,
                        args.tokens,
                        static_cast<int>(args.top_k),
                        columns,
                        tiles.tile};
  const auto kernel = reduce_kernel_of(args.src.dtype, out_dtype, args.groups != nullptr);
  kernel<<<tiles.ctas, kRowThreads, TermLists::bytes(tiles.tile, args.top_k), stream_of(stream)>>>(task);
  cuda_check(cudaGetLastError(), "reduce_rows launch");
}

void dot_rows_cuda(const DotArgs& args, std::uintptr_t stream) {
  if (args.count == 0) return;
  const int columns = columns_of(args.hidden, args.a.dtype);
  const int dots = kRowThreads * (args.a.dtype == DType::f32 ? 4 : 8) / 32;  // of a CTA
  const auto ctas = static_cast<unsigned>(
      std::min<std::int64_t>(ceil_div<std::int64_t>(args.count, dots), multiprocessors() * 8));
  // `a` is read where a slot asks for it, and slots are given by the caller: it needs no bound of its own.
  const DotTask task{args.out,
                     rows_at(args.a, args.count),
                     rows_at(args.b, args.b_rows),
                     args.idx,
                     args.count,
                     static_cast<int>(args.repeat),
                     columns};
  const auto kernel = args.a.dtype == DType::bf16  ? dot_kernel<DType::bf16>
                      : args.a.dtype == DType::f16 ? dot_kernel<DType::f16>
                                                   : dot_kernel<DType::f32>;
  kernel<<<ctas, kRowThreads, 0, stream_of(stream)>>>(task);
  cuda_check(cudaGetLastError(), "dot_rows launch");
}

}  // namespace flexep
