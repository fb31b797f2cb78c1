// Products of few rows by AVX-512 with VNNI, BF16 and VBMI. What has no use for these is `kAvx512`'s.
#if defined(__x86_64__) && defined(__GNUC__)
#define LEVEL 4
#include "cpu_gemm_level.h"

const Level kAvx512Bf16 = {kernel_of, prepare, is_prepared, element_size, kAvx512.norm_row, kAvx512.gate_row};
#endif
