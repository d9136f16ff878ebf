/* Plain C, for any machine. */
#define PATH path_c
#define ONE one_c
#define NAME "cpu-c"
#define LANES 4
#include "path.h"
