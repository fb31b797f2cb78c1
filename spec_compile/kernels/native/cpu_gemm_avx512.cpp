// Products of few rows by AVX-512.
#if defined(__x86_64__) && defined(__GNUC__)
#define LEVEL 2
#include "cpu_gemm_level.h"

constinit const Level kAvx512 = {kernel_of, prepare, is_prepared, element_size, norm_row, gate_row};
#endif
