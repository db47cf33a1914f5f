#include "ops/cast.cuh"

#include "ops/rows_launch.cuh"

namespace flexep {
namespace {

constexpr int kCastCtas = 4;  // of one SM

}  // namespace

void quantize_rows_cuda(const QuantizeArgs& args, std::uintptr_t stream) {
  if (args.rows == 0) return;
  const int columns = columns_of(args.hidden, DType::u8), padded = align_up(columns, kBlockLanes);
  const Tiles tiles(args.tokens, padded, kCastCtas), padding(args.rows, padded, kCastCtas);
  const QuantizeTask task{reinterpret_cast<char*>(args.payload),
                          args.scales,
                          rows_at(args.src, args.tokens),
                          args.row_map,
                          args.row_src,
                          args.rows,
                          static_cast<int>(args.top_k),
                          columns,
                          padded,
                          tiles.tile};
  const auto kernel = args.src.dtype == DType::bf16  ? quantize_kernel<DType::bf16>
                      : args.src.dtype == DType::f16 ? quantize_kernel<DType::f16>
                                                     : quantize_kernel<DType::f32>;
  kernel<<<std::max(tiles.ctas, padding.ctas), kRowThreads, 0, stream_of(stream)>>>(task);
  cuda_check(cudaGetLastError(), "quantize_rows launch");
}

void dequantize_rows_cuda(const DequantizeArgs& args, std::uintptr_t stream) {
  if (args.rows == 0) return;
  const int columns = columns_of(args.hidden, DType::u8);
  const Tiles tiles(args.rows, columns, kCastCtas);
  const DequantizeTask task{static_cast<char*>(args.out),
                            rows_at(args.payload, args.rows),
                            args.scales,
                            columns,
                            ceil_div(columns, kBlockLanes),
                            tiles.tile};
  const auto kernel = args.out_dtype == DType::bf16  ? dequantize_kernel<DType::bf16>
                      : args.out_dtype == DType::f16 ? dequantize_kernel<DType::f16>
                                                     : dequantize_kernel<DType::f32>;
  kernel<<<tiles.ctas, kRowThreads, 0, stream_of(stream)>>>(task);
  cuda_check(cudaGetLastError(), "dequantize_rows launch");
}

}  // namespace flexep
