#define TILE 1
#include "path_avx512vnni.c"
