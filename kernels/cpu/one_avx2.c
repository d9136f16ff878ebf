#define TILE 1
#include "path_avx2.c"
