// FLEXEP_HD marks a function that is compiled for host and device from one text, FLEXEP_HD_UNROLL a loop that
// the device must unroll, so that what it indexes can stay in registers.
#pragma once
#if defined(__CUDACC__)
#define FLEXEP_HD __host__ __device__ __forceinline__
#define FLEXEP_HD_UNROLL _Pragma("unroll")
#else
#define FLEXEP_HD inline
#define FLEXEP_HD_UNROLL
#endif
