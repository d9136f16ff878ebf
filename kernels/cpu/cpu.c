/* The calls that library.py makes: which path this machine runs, and threads that share units of
 * work. A unit is computed alike by any thread, so answers do not depend on their number. */
#include <pthread.h>
#include <stdatomic.h>
#include "pages.h"

enum { MOST_THREADS = 256 };
typedef void (*Work)(const void *job, int64_t unit);

static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t go, done;
    int threads, wanted, running;
    unsigned long turn;
    Work work;
    const void *job;
    int64_t units;
    atomic_llong next;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
          .go = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void take_units(void) {
    for (int64_t i; (i = atomic_fetch_add(&pool.next, 1)) < pool.units;) pool.work(pool.job, i);
}

static void *serve(void *number) {
    unsigned long seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.turn == seen || (intptr_t)number >= pool.wanted) {
            seen = pool.turn;
            pthread_cond_wait(&pool.go, &pool.lock);
        }
        seen = pool.turn;
        pthread_mutex_unlock(&pool.lock);
        take_units();
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void forget(void) { /* a child has no threads but the one that forked, and nobody to unlock */
    pool.threads = 0;
    pthread_mutex_init(&pool.busy, NULL), pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.go, NULL), pthread_cond_init(&pool.done, NULL);
}
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget);
}

static void share(Work work, const void *job, int64_t units, int64_t threads) {
    if (threads > units) threads = units;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy)) { /* somebody else's turn: work alone */
        for (int64_t i = 0; i < units; i++) work(job, i);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    for (pthread_t id; pool.threads < threads - 1; pool.threads++) { /* as many as there can be */
        if (pthread_create(&id, NULL, serve, (void *)(intptr_t)pool.threads)) break;
        pthread_detach(id);
    }
    pool.work = work, pool.job = job, pool.units = units;
    atomic_store(&pool.next, 0);
    pool.wanted = pool.running = pool.threads < threads - 1 ? pool.threads : (int)threads - 1;
    pool.turn++;
    pthread_cond_broadcast(&pool.go);
    pthread_mutex_unlock(&pool.lock);
    take_units();
    pthread_mutex_lock(&pool.lock);
    while (pool.running) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
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

/* Numbers of a token; an infinity becomes the largest one, which as bits is the one before it */
#define COPY(TYPE, INFINITE)                                     \
    for (int64_t i = 0; i < count; i++) {                        \
        TYPE u;                                                  \
        memcpy(&u, from + i * sizeof u, sizeof u);               \
        u -= (u & (TYPE) ~0 >> 1) == INFINITE;                   \
        memcpy(to + i * sizeof u, &u, sizeof u);                 \
    }
static void copy_token(uint8_t *to, const uint8_t *from, int64_t type, int64_t count) {
    if (type == FP32) COPY(uint32_t, 0x7f800000)
    else if (type == BF16) COPY(uint16_t, 0x7f80)
    else COPY(uint16_t, 0x7c00)
}

void disagg_append(int64_t path, const Append *x, int64_t threads) {
    (void)path, (void)threads; /* a few kilobytes */
    const Format *f = x->format;
    const int64_t size = f->raw == FP32 ? 4 : 2;
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t h = 0; x->pages[i] >= 0 && h < x->heads; h++) {
            uint8_t *token = x->arena + (int64_t)x->pages[i] * UNIT + x->base +
                             (x->layer * x->heads + h) * f->block_bytes + x->slots[i] * f->head_dim * size;
            copy_token(token + f->raw_k, x->k + size * (i * x->k_row + h * x->k_head), f->raw, f->head_dim);
            copy_token(token + f->raw_v, x->v + size * (i * x->v_row + h * x->v_head), f->raw, f->head_dim);
        }
}

void disagg_attend(int64_t path, const Attention *a, int64_t threads) {
    int64_t chunks = (a->m * a->width + ROWS - 1) / ROWS;
    const Path *run = find_path(path);
    share((Work)(a->m * a->width == 1 ? run->attend_one : run->attend), a, a->batch * a->heads * chunks,
          threads);
}

void disagg_step(int64_t path, const Step *x, int64_t threads) {
    disagg_append(path, &x->append, threads);
    disagg_attend(path, &x->attention, threads);
}

void disagg_encode(int64_t path, const Encoding *e, int64_t threads) {
    int64_t span = e->format->k->shared ? e->segment_tokens : e->format->tokens;
    share((Work)find_path(path)->encode, e, (e->tokens + span - 1) / span * e->heads, threads);
}
