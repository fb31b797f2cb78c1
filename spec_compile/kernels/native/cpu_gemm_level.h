// `Level` of cpu_gemm.h for a LEVEL of level.h. Each is a unit for the compiler, so that they compile side by side.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <immintrin.h>

#include "cpu_gemm.h"

namespace {
#include "numbers.h"
#include "cpu_gemm_vectors.h"
#include "cpu_gemm_blocks.h"
#if LEVEL == 4
#include "cpu_gemm_strips.h"
#endif
#include "cpu_gemm_pair_blocks.h"
#include "cpu_gemm_tiles.h"
#if LEVEL != 4
#include "cpu_gemm_around.h"
#endif
}  // namespace
