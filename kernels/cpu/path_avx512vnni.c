/* AVX-512 with VNNI, whose vpdpwssd takes the words of codes as they lie in pages. */
#define PATH path_avx512vnni
#define ONE one_avx512vnni
#define NAME "cpu-avx512vnni"
#define LANES 16
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#include "path.h"
