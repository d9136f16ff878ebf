/* One instruction set: attention and encoders, compiled for it alone. */
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
#include "encode.h"

const Path PATH = {NAME, attend_unit, encode_unit};
#if defined(TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
#endif
