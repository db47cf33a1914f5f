// FLEXEP_HD marks a function that is compiled for host and device from one text.
#pragma once
#if defined(__CUDACC__)
#define FLEXEP_HD __host__ __device__ __forceinline__
#else
#define FLEXEP_HD inline
#endif
