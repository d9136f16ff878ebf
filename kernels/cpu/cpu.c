/* The calls that library.py makes: which path this machine runs, and threads that share units of
 * work. A unit is computed alike by any thread, so answers do not depend on their number. */
#include <stdatomic.h>
#include "pages.h"

typedef struct {
    Job work;
    const void *job;
    int64_t units;
    atomic_llong next;
} Shared;

/* Of the OpenMP that torch brings. Its threads wait for work in a loop, and would keep any others
 * from the cores that torch may use; where torch has no such call, one thread does all. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

static void take_units(void *shared) {
    Shared *s = shared;
    for (int64_t i; (i = atomic_fetch_add(&s->next, 1)) < s->units;) s->work(s->job, i);
}

void disagg_share(Job work, const void *job, int64_t units, int64_t threads) {
    Shared shared = {work, job, units, 0};
    if (threads > 1 && units > 1 && GOMP_parallel)
        GOMP_parallel(take_units, &shared, (unsigned)threads, 0);
    else take_units(&shared);
}

static const Path *find_path(int64_t path) { /* NULL where this machine cannot run it */
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (path == 2 && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return &path_avx512vnni;
    if (path == 1 && avx2) return &path_avx2;
#endif
    return path == 0 ? &path_c : NULL;
}

const char *disagg_path(int64_t path) {
    return find_path(path) ? find_path(path)->name : NULL;
}

int64_t disagg_size(int64_t index) { /* of the structs that library.py fills in, in its order; then 0 */
    static const int64_t sizes[] = {sizeof(Side), sizeof(Format), sizeof(Table), sizeof(Encoding),
                                    sizeof(Squares), sizeof(Append), sizeof(Attention), sizeof(Step),
                                    sizeof(Norm), sizeof(Rotation), sizeof(Gate), sizeof(Exact),
                                    sizeof(Meeting), 0};
    return sizes[index];
}

void disagg_append(int64_t path, const Append *x, int64_t threads) {
    disagg_share((Job)find_path(path)->append, x, x->rows * x->heads, 1); /* a few kilobytes */
}

void disagg_attend(int64_t path, const Attention *a, int64_t threads) {
    const int64_t units = a->batch * a->heads * ((a->m * a->width + ROWS - 1) / ROWS);
    const Path *run = find_path(path);
    Attention job = *a;
    job.ahead = threads;
    disagg_share((Job)(a->m * a->width == 1 ? run->attend_one : run->attend), &job, units, threads);
}

void disagg_step(int64_t path, const Step *x, int64_t threads) {
    disagg_append(path, &x->append, threads);
    disagg_attend(path, &x->attention, threads);
}

void disagg_encode(int64_t path, const Encoding *e, int64_t threads) {
    int64_t span = e->format->k->shared ? e->segment_tokens : e->format->tokens;
    disagg_share((Job)find_path(path)->encode, e, (e->tokens + span - 1) / span * e->heads, threads);
}

void disagg_sum_squares(int64_t path, const Squares *s, int64_t threads) {
    disagg_share((Job)find_path(path)->sum_squares, s, (s->begun + s->tokens + SLOTS - 1) / SLOTS * s->heads, threads);
}

static int64_t units_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

void disagg_norm(int64_t path, const Norm *n, int64_t threads) {
    disagg_share((Job)find_path(path)->norm, n, units_of(n->rows), threads);
}

void disagg_rotate(int64_t path, const Rotation *r, int64_t threads) {
    disagg_share((Job)find_path(path)->rotate, r, units_of(r->rows), threads);
}

void disagg_gate(int64_t path, const Gate *g, int64_t threads) {
    disagg_share((Job)find_path(path)->gate, g, units_of(g->rows), threads);
}
