/* Where ranks of one host meet: each counts its arrivals in memory that they share. What a rank wrote
 * before it arrived is seen by whoever has waited for it. */
#include <stdatomic.h>
#include <time.h>
#include "pages.h"

enum { COUNTER = 8, SPIN_NS = 50 * 1000, NAP_NS = 20 * 1000 }; /* COUNTER: int64 numbers, a cache line */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t find_late(const Meeting *m) { /* a rank that has not come, or -1 */
    const atomic_llong *counters = (const atomic_llong *)m->counters;
    for (int64_t rank = 0; rank < m->ranks; rank++)
        if (atomic_load_explicit(&counters[rank * COUNTER], memory_order_acquire) < m->number) return rank;
    return -1;
}

void disagg_arrive(int64_t path, Meeting *m, int64_t threads) {
    atomic_llong *counters = (atomic_llong *)m->counters;
    atomic_store_explicit(&counters[m->rank * COUNTER], m->number, memory_order_release);
}

/* Return when all have arrived, or after wait_ns. The first wait in a loop, as ranks mostly come within
 * microseconds of each other; then a nap at a time, as a late one may need this core. */
void disagg_meet(int64_t path, Meeting *m, int64_t threads) {
    const int64_t began = now_ns();
    while ((m->late = find_late(m)) >= 0) {
        int64_t waited = now_ns() - began;
        if (waited > m->wait_ns) return;
        if (waited < SPIN_NS) pause_core();
        else nanosleep(&(struct timespec){0, NAP_NS}, NULL);
    }
}
