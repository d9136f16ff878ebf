/* AVX2 with FMA and F16C. */
#define PATH path_avx2
#define ONE one_avx2
#define NAME "cpu-avx2"
#define LANES 8
#define TARGET "avx2,fma,f16c"
#include "path.h"
