// Products of few rows by AVX2.
#if defined(__x86_64__) && defined(__GNUC__)
#include "few_rows_level.h"

#define KERNEL __attribute__((target("avx2,fma,f16c")))
#define NATIVE 0

namespace {
#include "few_rows_numbers.h"
#include "few_rows_avx2.h"
#include "few_rows_panels.h"
#include "few_rows_blocks.h"
#include "few_rows_tiles.h"
#include "few_rows_around.h"
}  // namespace

const Level kAvx2 = {run, prepare, is_prepared, element_size, norm_row, gate_row};
#endif
