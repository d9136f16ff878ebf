/* One instruction set: attention and encoders, compiled for it alone; and attention once more for one
 * query of a KV head, in whose tiles three of four would be idle. */
#if !defined(TARGET) || defined(__x86_64__)
#if defined(TARGET) && defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target(TARGET))), apply_to = function)
#elif defined(TARGET)
#define PRAGMA(x) _Pragma(#x)
#define TARGET_PRAGMA(x) PRAGMA(GCC target(x))
TARGET_PRAGMA(TARGET)
#endif
#include "attend.h"
#if TILE == 1
void ONE(const Attention *a, int64_t unit) { attend_unit(a, unit); }
#else
#include "encode.h"
#include "rows.h"
const Path PATH = {NAME, attend_unit, ONE, append_unit, encode_unit, sum_squares, norm_unit, rotate_unit, gate_unit};
#endif
#if defined(TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
#endif
