// Products of few rows by AVX2.
#if defined(__x86_64__) && defined(__GNUC__)
#define LEVEL 1
#include "cpu_gemm_level.h"

const Level kAvx2 = {kernel_of, prepare, is_prepared, element_size, norm_row, gate_row};
#endif
