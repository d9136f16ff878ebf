#define TILE 1
#include "path_c.c"
