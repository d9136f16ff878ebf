/* Exact causal attention of a chunk of a prompt in bfloat16, on the matrix units of a CPU (AMX).
 *
 * Scores are computed with keys as rows and queries as lanes: so a softmax is over rows, and weights are
 * in the order that the second product wants. A unit is QUERIES queries of one head. */
#if defined(__x86_64__) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxtileintrin.h>)
#define HAS_AMX
#endif
#endif
#define LANES 16
#ifdef HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __clang__
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-bf16")
#endif
#pragma GCC diagnostic ignored "-Wunused-function" /* of simd.h, only small helpers serve here */
#include "simd.h"

enum { QUERIES = 32, KEYS = 128, GROUP = 32, MOST = 256, BOTH = QUERIES / LANES };
typedef struct {
    ALIGNED float scores[KEYS][QUERIES], out[MOST][QUERIES];
    ALIGNED uint32_t weights[KEYS / 2][QUERIES];            /* of two keys */
    ALIGNED uint32_t queries[MOST / GROUP][BOTH][16][LANES]; /* two channels of each */
    ALIGNED uint16_t last_keys[GROUP][MOST];
    V top[BOTH], total[BOTH];
} Work;

typedef struct { /* as the processor wants it */
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} ALIGNED Tiles;

int64_t disagg_has_amx(void) { /* and asks the kernel for its registers */
    __builtin_cpu_init();
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, TILES = 1 << 22 | 1 << 24 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return 0;
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bw")) return 0;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
}

INLINE V v_exp2_near(V x) { /* to 2**-14, of x <= 0 */
    V whole = x + 0x1.8p23f, f = x - (whole - 0x1.8p23f), p = v_set(0.00961813f);
    p = v_fma(p, f, v_set(0.05550411f)), p = v_fma(p, f, v_set(0.24022651f));
    p = v_fma(p, f, v_set(0.69314718f)), p = v_fma(p, f, v_set(1));
    return (V)(((W)p + ((W)whole << 23)) & ~(x < -90.0f));
}

/* what was written is in memory: loads of tiles do not say that they read it */
#define SETTLE __asm__ volatile("" ::: "memory")

/* Scores of GROUP keys, not scaled yet */
INLINE void score_group(Work *w, const uint16_t *keys, int64_t row, int64_t dim, float (*out)[QUERIES]) {
    SETTLE;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t t = 0; t < dim / GROUP; t++) {
        _tile_loadd(4, keys + t * GROUP, 2 * row); _tile_loadd(5, keys + 16 * row + t * GROUP, 2 * row);
        _tile_loadd(6, w->queries[t][0], 64); _tile_loadd(7, w->queries[t][1], 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out[0], 4 * QUERIES); _tile_stored(1, out[0] + 16, 4 * QUERIES);
    _tile_stored(2, out[16], 4 * QUERIES); _tile_stored(3, out[16] + 16, 4 * QUERIES);
}

/* out += values [dim][keys] times weights */
INLINE void add_values(Work *w, const uint16_t *values, int64_t row, int64_t dim, int64_t keys) {
    SETTLE;
    for (int64_t d = 0; d < dim; d += GROUP) {
        float *low = w->out[d], *high = w->out[d + 16];
        _tile_loadd(0, low, 4 * QUERIES); _tile_loadd(1, low + 16, 4 * QUERIES);
        _tile_loadd(2, high, 4 * QUERIES); _tile_loadd(3, high + 16, 4 * QUERIES);
        for (int64_t i = 0; i < keys; i += GROUP) {
            _tile_loadd(4, values + d * row + i, 2 * row); _tile_loadd(5, values + (d + 16) * row + i, 2 * row);
            _tile_loadd(6, w->weights[i / 2], 4 * QUERIES); _tile_loadd(7, w->weights[i / 2] + 16, 4 * QUERIES);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, low, 4 * QUERIES); _tile_stored(1, low + 16, 4 * QUERIES);
        _tile_stored(2, high, 4 * QUERIES); _tile_stored(3, high + 16, 4 * QUERIES);
    }
}

/* Scores of keys from `first` on become weights; the first query sees keys up to `seen` */
INLINE void soften(Work *w, int64_t first, int64_t keys, int64_t seen, int64_t dim, float scale) {
    W lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    V most[BOTH], by = v_set(scale), down[BOTH];
    for (int64_t i = seen + 1 > first ? seen + 1 - first : 0; i < keys; i++)
        for (int h = 0; h < BOTH; h++) {
            const W hidden = lane + (int32_t)(seen + h * LANES) < (W){0} + (int32_t)(first + i);
            const V s = v_load(w->scores[i] + h * LANES);
            v_store(w->scores[i] + h * LANES, (V)(((W)s & ~hidden) | (hidden & (int32_t)0xff800000)));
        }
    for (int h = 0; h < BOTH; h++) most[h] = w->top[h];
    for (int64_t i = 0; i < keys; i++)
        for (int h = 0; h < BOTH; h++) most[h] = v_max(v_load(w->scores[i] + h * LANES), most[h]);
    for (int h = 0; h < BOTH; h++) {
        down[h] = v_exp2_near((w->top[h] - most[h]) * by);
        w->total[h] *= down[h], w->top[h] = most[h], most[h] = most[h] * by;
    }
    for (int64_t i = 0; i < keys; i += 2)
        for (int h = 0; h < BOTH; h++) {
            const V a = v_exp2_near(v_fma(v_load(w->scores[i] + h * LANES), by, -most[h]));
            const V b = v_exp2_near(v_fma(v_load(w->scores[i + 1] + h * LANES), by, -most[h]));
            const W pair = ((W)b + 0x8000) & (int32_t)0xffff0000, low = (W)a + 0x8000;
            v_store((float *)w->weights[i / 2] + h * LANES, (V)(pair | (low >> 16 & 0xffff)));
            w->total[h] += a + b;
        }
    const W same = (down[0] == 1) & (down[1] == 1);
    if (_mm512_movepi32_mask((__m512i)same) == 0xffff) return; /* the usual case, after the first keys */
    for (int64_t d = 0; d < dim; d++)
        for (int h = 0; h < BOTH; h++)
            v_store(w->out[d] + h * LANES, v_load(w->out[d] + h * LANES) * down[h]);
}

static void lay_queries(Work *w, const Exact *e, const uint16_t *q, int64_t rows) {
    for (int64_t t = 0; t < e->head_dim / GROUP; t++)
        for (int h = 0; h < BOTH; h++) {
            V x[LANES];
            for (int i = 0; i < LANES; i++) {
                x[i] = (V){0};
                if (h * LANES + i < rows) x[i] = v_load((const void *)(q + (h * LANES + i) * e->q_row + t * GROUP));
            }
            v_transpose(x);
            for (int i = 0; i < LANES; i++) v_store((float *)w->queries[t][h][i], x[i]);
        }
}

static void write_out(const Work *w, const Exact *e, uint16_t *to, int64_t rows) {
    for (int64_t d = 0; d < e->head_dim; d += LANES)
        for (int h = 0; h < BOTH; h++) {
            V x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = v_load(w->out[d + i] + h * LANES) / w->total[h];
            v_transpose(x);
            for (int i = 0; i < LANES && h * LANES + i < rows; i++)
                v_write((uint8_t *)(to + (h * LANES + i) * e->out_row), d, x[i], BF16);
        }
}

static void exact_unit(const Exact *e, int64_t unit) {
    static const Tiles ours = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    Tiles theirs;
    Work w;
    const int64_t blocks = (e->count + QUERIES - 1) / QUERIES, dim = e->head_dim;
    const int64_t first = (blocks - 1 - unit % blocks) * QUERIES, head = unit / blocks; /* the longest first */
    const int64_t rows = e->count - first < QUERIES ? e->count - first : QUERIES;
    const int64_t seen = e->total - e->count + first, end = seen + rows;
    const uint16_t *keys = e->k + head / e->width * e->k_head, *values = e->v + head / e->width * e->v_head;
    lay_queries(&w, e, e->q + head * e->q_head + first * e->q_row, rows);
    for (int h = 0; h < BOTH; h++) w.top[h] = v_set(-1e30f), w.total[h] = (V){0};
    memset(w.out, 0, dim * sizeof w.out[0]);
    _tile_storeconfig(&theirs); /* of another library, which may not look again */
    _tile_loadconfig(&ours);
    for (int64_t at = 0; at < end; at += KEYS) {
        const int64_t some = end - at < KEYS ? (end - at + GROUP - 1) / GROUP * GROUP : KEYS;
        for (int64_t i = 0; i < some; i += GROUP) {
            const uint16_t *x = keys + (at + i) * e->k_row;
            int64_t row = e->k_row;
            if (at + i + GROUP > e->total) { /* behind the last key there may be no memory */
                memset(w.last_keys, 0, sizeof w.last_keys);
                for (int64_t j = at + i; j < e->total; j++) memcpy(w.last_keys[j - at - i], keys + j * row, 2 * dim);
                x = w.last_keys[0], row = MOST;
            }
            score_group(&w, x, row, dim, w.scores + i);
        }
        soften(&w, at, some, seen, dim, e->scale * 1.44269504f);
        add_values(&w, values + at, e->v_row, dim, some);
    }
    if (theirs.palette) _tile_loadconfig(&theirs);
    else _tile_release();
    write_out(&w, e, e->out + head * e->out_head + first * e->out_row, rows);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
#include "pages.h"
int64_t disagg_has_amx(void) { return 0; }
static void exact_unit(const Exact *e, int64_t unit) {}
#endif

void disagg_attend_exact(int64_t path, const Exact *e, int64_t threads) {
    disagg_share((Job)exact_unit, e, (e->count + 31) / 32 * e->heads * e->width, threads);
}
