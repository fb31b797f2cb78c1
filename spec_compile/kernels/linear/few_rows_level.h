// What few_rows_LEVEL.cpp have in common. Each is a unit for the compiler, so that they compile side by side.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <immintrin.h>

#include "few_rows.h"

#define INLINE KERNEL __attribute__((always_inline)) inline
// Large functions compile in less time if they are not inlined into one.
#define APART KERNEL __attribute__((noinline))
