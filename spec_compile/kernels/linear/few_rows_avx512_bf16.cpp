// Products of few rows by AVX-512 with VNNI, BF16 and VBMI. What has no use for these is `kAvx512`'s.
#if defined(__x86_64__) && defined(__GNUC__)
#include "few_rows_level.h"

#define KERNEL \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")))
#define NATIVE 1

namespace {
#include "few_rows_numbers.h"
#include "few_rows_avx512.h"
#include "few_rows_panels.h"
#include "few_rows_blocks.h"
#include "few_rows_decode.h"
#include "few_rows_strips.h"
#include "few_rows_pairs.h"
#include "few_rows_tiles.h"
}  // namespace

const Level kAvx512Bf16 = {run, prepare, is_prepared, element_size, kAvx512.norm_row, kAvx512.gate_row};
#endif
