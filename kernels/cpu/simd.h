/* A vector of floats, and products of code words with int16 vectors, in the instructions of a path:
 * USE_AVX512 and USE_AVX2 are set by the file that includes this; with neither it is plain C.
 * What the vectors of the compiler can say, they say for all three. */
#include "pages.h"
#if defined(USE_AVX512) || defined(USE_AVX2)
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64))) /* a load that crosses lines of a cache takes two */

#if defined(USE_AVX512)
#define LANES 16
#elif defined(USE_AVX2)
#define LANES 8
#else
#define LANES 4
#endif
enum { SUMS = LANES == 16 ? 16 : 8 }; /* vectors of sums that registers hold */
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t W __attribute__((vector_size(4 * LANES)));
typedef int16_t Short __attribute__((vector_size(2 * LANES)));
typedef uint16_t Word __attribute__((vector_size(2 * LANES)));
typedef int8_t Byte __attribute__((vector_size(LANES)));

INLINE V v_load(const float *p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void v_store(float *p, V x) { memcpy(p, &x, sizeof x); }
INLINE V v_set(float x) { return x - (V){0}; }
INLINE V v_abs(V a) { return (V)((W)a & 0x7fffffff); }
INLINE V v_round(V a) { return (a + 0x1.8p23f) - 0x1.8p23f; } /* below 2**22; ties to even */
INLINE V v_number(V a) { return (V)((W)a & (a == a)); }       /* 0 where it is none */
INLINE V v_zero_below(V a, V x, float limit) { return (V)((W)a & ~(x < limit)); }

#if LANES > 4
#if LANES == 16
#define MM(name) _mm512_##name
typedef __m256i Half;
#else
#define MM(name) _mm256_##name
typedef __m128i Half;
#endif
INLINE V v_fma(V a, V b, V c) { return MM(fmadd_ps)(a, b, c); }
INLINE V v_fused(V a, V b, V c) { return v_fma(a, b, c); }
INLINE V v_max(V a, V b) { return MM(max_ps)(a, b); } /* of equals, and where one is NaN: b */
INLINE V v_min(V a, V b) { return MM(min_ps)(a, b); }
INLINE void v_store_half(void *p, V a) {
    const Half h = MM(cvtps_ph)(a, 8);
    memcpy(p, &h, sizeof h);
}
INLINE V v_half(const void *p) {
    Half h;
    return MM(cvtph_ps)(*(const Half *)memcpy(&h, p, sizeof h));
}
#else
INLINE V v_fma(V a, V b, V c) { return a * b + c; }
INLINE V v_fused(V a, V b, V c) { /* rounded once, on any machine */
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
INLINE V v_max(V a, V b) { return (V)(((W)a & (a > b)) | ((W)b & ~(a > b))); }
INLINE V v_min(V a, V b) { return (V)(((W)a & (a < b)) | ((W)b & ~(a < b))); }
INLINE V v_half(const void *p) { /* fp16 counts exponents from 15, fp32 from 127 */
    Word h;
    memcpy(&h, p, sizeof h);
    const W w = __builtin_convertvector(h, W), rest = (w & 0x7fff) << 13;
    const V x = (V)(rest + (0x70000000 & (rest >= 0x0f800000))); /* infinite, or no number */
    return (V)((W)(x * 0x1p112f) | (w & 0x8000) << 16);
}
INLINE void v_store_half(void *p, V a) { /* to nearest, ties to even; of numbers */
    const W u = (W)a & 0x7fffffff, usual = (u - 0x37fff001 + (u >> 13 & 1)) >> 13;
    const W tiny = (W)((V)u + 0.5f) - 0x3f000000; /* this rounds what is below fp16's normal numbers */
    const W small = u < 0x38800000, large = usual > 0x7c00;
    const W most = (0x7c00 & large) | (usual & ~large), bits = (tiny & small) | (most & ~small);
    const Word h = __builtin_convertvector(bits | ((W)a >> 16 & 0x8000), Word);
    memcpy(p, &h, sizeof h);
}
#endif

INLINE V v_bfloat(const void *p) {
    Word h;
    memcpy(&h, p, sizeof h);
    return (V)(__builtin_convertvector(h, W) << 16);
}
INLINE V v_float8(const void *p) { /* 2**-8 of it: fp16 counts exponents from 15, e4m3 from 7 */
    Byte b;
    memcpy(&b, p, sizeof b);
    Short h = (__builtin_convertvector(b, Short) << 7) & -0x4080;
    return v_half(&h);
}
INLINE void v_store_int16(int16_t *p, V a) { /* of whole numbers; of larger ones the low 16 bits */
    Short h = __builtin_convertvector(__builtin_convertvector(a, W), Short);
    memcpy(p, &h, sizeof h);
}
INLINE float v_sum(V a) {
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) a[i] += a[i + n];
    return a[0];
}
/* Numbers of a and b: the same four of every 128 bits; or all of every other 128 bits. And of a: the
 * first of every 128 bits, then the second ones, the third and the last ones */
#if LANES == 16
#define IN_FOURS(a, b, i, j, k, l)                                                             \
    __builtin_shufflevector(a, b, i, j, k, l, 4 + i, 4 + j, 4 + k, 4 + l, 8 + i, 8 + j, 8 + k, \
                            8 + l, 12 + i, 12 + j, 12 + k, 12 + l)
#define FOURS(a, b, i)                                                                            \
    __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, i + 8, i + 9, i + 10, i + 11, i + 16,   \
                            i + 17, i + 18, i + 19, i + 24, i + 25, i + 26, i + 27)
#define ACROSS(a) __builtin_shufflevector(a, a, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
#elif LANES == 8
#define IN_FOURS(a, b, i, j, k, l) \
    __builtin_shufflevector(a, b, i, j, k, l, 4 + i, 4 + j, 4 + k, 4 + l)
#define FOURS(a, b, i) \
    __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, i + 8, i + 9, i + 10, i + 11)
#define ACROSS(a) __builtin_shufflevector(a, a, 0, 4, 1, 5, 2, 6, 3, 7)
#else
#define IN_FOURS __builtin_shufflevector
#define FOURS(a, b, i) a
#define ACROSS(a) a
#endif
#define LOW_ONES(a, b) IN_FOURS(a, b, 0, LANES, 1, LANES + 1)
#define HIGH_ONES(a, b) IN_FOURS(a, b, 2, LANES + 2, 3, LANES + 3)
#define LOW_TWOS(a, b) IN_FOURS(a, b, 0, 1, LANES, LANES + 1)
#define HIGH_TWOS(a, b) IN_FOURS(a, b, 2, 3, LANES + 2, LANES + 3)

/* The largest number of each of four vectors, in every 128 bits */
INLINE V v_mosts(const V *a) {
    V u = v_max(LOW_ONES(a[0], a[1]), HIGH_ONES(a[0], a[1]));
    V v = v_max(LOW_ONES(a[2], a[3]), HIGH_ONES(a[2], a[3]));
    V most = v_max(LOW_TWOS(u, v), HIGH_TWOS(u, v));
    for (int n = LANES / 4; n > 1; n /= 2) most = v_max(FOURS(most, most, 0), FOURS(most, most, 4));
    return most;
}

/* LANES vectors -> the sum of each */
INLINE V v_sums(const V *a) {
    V u[LANES / 2], v[LANES / 4];
#pragma GCC unroll 8
    for (int j = 0; j < LANES / 2; j++)
        u[j] = LOW_ONES(a[2 * j], a[2 * j + 1]) + HIGH_ONES(a[2 * j], a[2 * j + 1]);
#pragma GCC unroll 4
    for (int k = 0; k < LANES / 4; k++)
        v[k] = LOW_TWOS(u[2 * k], u[2 * k + 1]) + HIGH_TWOS(u[2 * k], u[2 * k + 1]);
#pragma GCC unroll 2
    for (int n = LANES / 8; n; n /= 2)
#pragma GCC unroll 2
        for (int k = 0; k < n; k++)
            v[k] = FOURS(v[2 * k], v[2 * k + 1], 0) + FOURS(v[2 * k], v[2 * k + 1], 4);
    return v[0];
}

INLINE void v_transpose(V *a) { /* LANES vectors */
    V t[LANES], u[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        t[i] = LOW_ONES(a[i], a[i + 1]);
        t[i + 1] = HIGH_ONES(a[i], a[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        const int from = i / 4 * 4 + i % 4 / 2;
        u[i] = LOW_TWOS(t[from], t[from + 2]);
        u[i + 1] = HIGH_TWOS(t[from], t[from + 2]);
    }
    memcpy(a, u, sizeof u);
#if LANES > 4
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
#if LANES == 16
        const V b = FOURS(u[k], u[4 + k], 0), c = FOURS(u[8 + k], u[12 + k], 0);
        const V d = FOURS(u[k], u[4 + k], 4), e = FOURS(u[8 + k], u[12 + k], 4);
        a[k] = FOURS(b, c, 0), a[8 + k] = FOURS(b, c, 4);
        a[4 + k] = FOURS(d, e, 0), a[12 + k] = FOURS(d, e, 4);
#else
        a[k] = FOURS(u[k], u[4 + k], 0), a[4 + k] = FOURS(u[k], u[4 + k], 4);
#endif
    }
#endif
}

/* Sixteen numbers, times `by` and rounded, as int16; their sum is added to `sum`, exactly */
INLINE W store_rounded(int16_t *p, const float *from, V by, W sum) {
#if defined(USE_AVX512)
    const __m512i x = _mm512_cvtps_epi32(v_load(from) * by);
    _mm256_storeu_si256((void *)p, _mm512_cvtsepi32_epi16(x));
    return sum + (W)x;
#elif defined(USE_AVX2)
    const __m256i x = _mm256_cvtps_epi32(v_load(from) * by), y = _mm256_cvtps_epi32(v_load(from + 8) * by);
    _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x, y), 0xd8));
    return sum + (W)x + (W)y;
#else
    for (int i = 0; i < 16; i += LANES) {
        const V x = v_round(v_load(from + i) * by);
        v_store_int16(p + i, x);
        sum += __builtin_convertvector(x, W);
    }
    return sum;
#endif
}

INLINE V v_exp2(V x) { /* of x <= 0; 0 below 2**-90, before it costs subnormal products */
    static const float terms[6] = {0x1.5f44e4p-10f, 0x1.3b2cc4p-7f, 0x1.c6aed6p-5f,
                                   0x1.ebfbdcp-3f,  0x1.62e43p-1f,  1.0f};
    V whole = x + 0x1.8p23f, f = x - (whole - 0x1.8p23f), p = v_set(0x1.4258ep-13f);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) p = v_fma(p, f, v_set(terms[i]));
    return v_zero_below((V)((W)p + ((W)whole << 23)), x, -90.0f); /* its exponent counts on */
}
INLINE V v_read(const uint8_t *p, int64_t i, int type) { /* LANES numbers from the i-th on */
    if (type == FP16) return v_half(p + 2 * i);
    if (type == BF16) return v_bfloat(p + 2 * i);
    if (type == FP8) return v_float8(p + i);
    return v_load((const float *)p + i);
}

/* Sums of codes times vectors.
 *
 * A part is some words of each row: `width` of them, in rows that are `stride` bytes apart
 * next: what is read after them, for the cache
 * at:   where their columns begin in a vector: of 2 bits those of both halves of a word
 */
typedef struct {
    const uint8_t *words, *next;
    int64_t stride, width, at[2], bits;
} Part;

/* x:    what codes of field f are multiplied by: int16 [4 queries] at OPERANDS numbers
 * times, add: [fields][4 queries], of a sum s: s * times + add; 8 bits have two fields, both twice
 * odd:  bits that every other field is up in its sum: as the narrowest part has them in its words
 * out:  [4 queries] at LINE numbers: [fields] at `plane` numbers: rows `first` to `end` */
typedef struct {
    Part parts[2 * STRIP];
    const int16_t *x[4];
    float times[16], add[16], *out;
    int64_t plane;
    int count, fields, odd, first, end;
} Products;

#if LANES > 4
typedef uint16_t Codes __attribute__((vector_size(4 * LANES)));
enum { FIELDS = LANES / 4 }; /* whose sums registers hold, of four queries */
#define WORDS(i) _mm_loadu_si128((const void *)(p + at[i]))
#if defined(USE_AVX512)
/* not _mm512_dpwssd_epi32: gcc 12 moves all sums to other registers and back in every turn of a loop */
#define DOT(i, z, y) __asm__("vpdpwssd %2, %1, %0" : "+v"(a[i]) : "v"(z), "v"(y))
INLINE V eight_words(const uint8_t *p, const int64_t *at) { /* of every fourth row */
    __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(WORDS(0)), WORDS(1), 1);
    x = _mm512_inserti32x4(x, WORDS(2), 2);
    return (V)_mm512_inserti32x4(x, WORDS(3), 3);
}
#else
/* not intrinsics: gcc 12 adds up products of two chunks first, for which registers do not suffice */
#define DOT(i, z, y)                                        \
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" \
            : "+x"(a[i]), "=&x"(product)                    \
            : "x"(z), "x"(y))
INLINE V eight_words(const uint8_t *p, const int64_t *at) {
    return (V)_mm256_inserti128_si256(_mm256_castsi128_si256(WORDS(0)), WORDS(1), 1);
}
#endif

/* Two words of each of LANES rows: FIELDS fields of them from `bit` on, times the columns that x has
 * at `to`. A sum of a row stays in one lane. same: x is, of every two fields */
INLINE void add_codes(W *a, Codes words, int bits, int bit, const int16_t *const *x, int64_t to, int odd,
                      int same) {
    const uint16_t mask = (1 << bits) - 1;
    W product;
    (void)product;
    for (int f = 0; f < FIELDS && f * bits < 16; f += 2) {
        const int at = bit + f * bits;
        const Codes y = words >> at & mask, z = words >> (at + bits - odd) & (uint16_t)(mask << odd);
#pragma GCC unroll 4
        for (int h = 0; h < TILE; h++) {
            int32_t b, c;
            memcpy(&b, x[f] + to + h * OPERANDS, sizeof b);
            memcpy(&c, x[same ? f : f + 1] + to + h * OPERANDS, sizeof c);
            DOT(4 * f + h, y, (W){0} + b);
            DOT(4 * f + 4 + h, z, (W){0} + c);
        }
    }
}

/* Rows from `row` on; there are `rows` of them: lanes without one take another one's words */
INLINE void add_part(W *a, const Part *p, int64_t row, int64_t rows, int bits, int field,
                     const int16_t *const *x, int odd, int same) {
    const uint8_t *from = p->words + row * p->stride, *next = p->next + row * p->stride;
    int64_t at[LANES / 4];
    for (int i = 0; i < LANES / 4; i++) at[i] = (4 * i < rows ? 4 * i : 0) * p->stride;
    for (int64_t c = 0; c < p->width; c += 8, from += 16) {
        V u[4], v[4];
#pragma GCC unroll 4
        for (int i = 0; i < LANES / 4 && field == 0; i++, next += 64) __builtin_prefetch(next);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) u[i] = eight_words(from + i * p->stride, at);
        v[0] = LOW_ONES(u[0], u[1]), v[1] = HIGH_ONES(u[0], u[1]);
        v[2] = LOW_ONES(u[2], u[3]), v[3] = HIGH_ONES(u[2], u[3]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { /* words 2 i and 2 i + 1 of all rows */
            const V low = v[i / 2], high = v[i / 2 + 2];
            const Codes words = (Codes)(i % 2 ? HIGH_TWOS(low, high) : LOW_TWOS(low, high));
            add_codes(a, words, bits, field * bits, x, p->at[0] + c + 2 * i, odd, same);
            if (bits == 2) add_codes(a, words, bits, field * bits + 8, x, p->at[1] + c + 2 * i, odd, same);
        }
    }
}

INLINE void products_in(const Products *p, int fields, int field, int same) {
    const int16_t *const *x = p->x + field;
    for (int64_t row = p->first; row < p->end; row += LANES) {
        const int64_t start = row + LANES < p->plane ? row : p->plane > LANES ? p->plane - LANES : 0;
        const int64_t lane = row - start, rows = p->plane - start, most = LANES - lane;
        const int64_t left = p->end - row < most ? p->end - row : most;
        W a[4 * FIELDS];
#pragma GCC unroll 16
        for (int i = 0; i < 4 * FIELDS; i++) a[i] = (W){0};
        for (const Part *part = p->parts; part < p->parts + p->count; part++) {
            if (fields == 2) add_part(a, part, start, rows, 8, field, x, 0, same);
            else if (p->odd == 4) add_part(a, part, start, rows, 4, field, x, 4, same);
            else if (part->bits == 4) add_part(a, part, start, rows, 4, field, x, 2, same);
            else add_part(a, part, start, rows, 2, field, x, 2, same);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 4 * FIELDS; i++) { /* of a field and a query */
            const int f = field + i / 4;
            if (i % 4 >= TILE || f >= fields) continue;
            const V sums = v_fma(__builtin_convertvector(a[i], V), v_set(p->times[4 * f + i % 4]),
                                 v_set(p->add[4 * f + i % 4]));
            float *to = p->out + i % 4 * LINE + f * p->plane + row;
            if (left == LANES) v_store(to, sums);
            else memcpy(to, (float *)&sums + lane, 4 * left);
        }
    }
}

INLINE void products_of(const Products *p, int same) {
    if (p->fields == 2) products_in(p, 2, 0, same);
    else products_in(p, 4, 0, same);
    if (p->fields == 4 && FIELDS == 2) products_in(p, 4, 2, same);
}

static void products(const Products *p) {
    if (p->x[0] == p->x[1] && p->x[2 % p->fields] == p->x[3 % p->fields]) products_of(p, 1);
    else products_of(p, 0);
}
#else
static void products(const Products *p) {
    int16_t words[MAX_DIM], codes[MAX_DIM];
    for (int r = p->first; r < p->end; r++) {
        int32_t sums[16] = {0};
        for (const Part *part = p->parts; part < p->parts + p->count; part++) {
            const int halves = part->bits == 2 ? 2 : 1, bits = (int)part->bits;
            memcpy(words, part->words + r * part->stride, 2 * part->width);
            for (int i = 0; i < p->fields * halves; i++) {
                const int f = i / halves, half = i % halves, shift = f * bits + 8 * half;
                const int up = f % 2 ? p->odd : 0;
                for (int64_t c = 0; c < part->width; c++)
                    codes[c] = ((uint16_t)words[c] >> shift & ((1 << bits) - 1)) << up;
                const int16_t *q = p->x[f] + part->at[half];
                for (int h = 0; h < TILE; h++, q += OPERANDS)
                    for (int64_t c = 0; c < part->width; c++) sums[4 * f + h] += codes[c] * q[c];
            }
        }
        for (int f = 0; f < p->fields; f++)
            for (int h = 0; h < TILE; h++)
                p->out[h * LINE + f * p->plane + r] =
                    (float)sums[4 * f + h] * p->times[4 * f + h] + p->add[4 * f + h];
    }
}
#endif
