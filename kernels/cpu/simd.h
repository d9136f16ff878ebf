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
enum { SUMS = LANES == 16 ? 16 : 8 }; /* vectors that sums_of adds up: as many as registers hold */
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
INLINE V v_zero_below(V a, V x, float limit) { return (V)((W)a & (x >= limit)); }
INLINE V v_times_power(V a, V n) { return a * (V)((__builtin_convertvector(n, W) + 127) << 23); }

#if defined(USE_AVX512)
INLINE V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V v_fused(V a, V b, V c) { return v_fma(a, b, c); }
INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); } /* of equals, and where one is NaN: b */
INLINE V v_min(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V v_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void v_store_half(void *p, V a) { _mm256_storeu_si256(p, _mm512_cvtps_ph(a, 8)); }
#elif defined(USE_AVX2)
INLINE V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V v_fused(V a, V b, V c) { return v_fma(a, b, c); }
INLINE V v_max(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V v_min(V a, V b) { return _mm256_min_ps(a, b); }
INLINE V v_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void v_store_half(void *p, V a) { _mm_storeu_si128(p, _mm256_cvtps_ph(a, 8)); }
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
INLINE float v_most(V a) {
#if defined(USE_AVX512)
    return _mm512_reduce_max_ps(a);
#elif defined(USE_AVX2)
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
#else
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
    return a[0];
#endif
}

#if defined(USE_AVX512)
INLINE void transpose_sums(__m512 *a) {
    __m512 t[16], u[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#define PD _mm512_castps_pd
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(PD(t[4 * i]), PD(t[4 * i + 2])));
        u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(PD(t[4 * i]), PD(t[4 * i + 2])));
        u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(PD(t[4 * i + 1]), PD(t[4 * i + 3])));
        u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(PD(t[4 * i + 1]), PD(t[4 * i + 3])));
    }
#undef PD
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512 x = _mm512_shuffle_f32x4(u[k], u[4 + k], 0x88);
        __m512 y = _mm512_shuffle_f32x4(u[k], u[4 + k], 0xdd);
        __m512 z = _mm512_shuffle_f32x4(u[8 + k], u[12 + k], 0x88);
        __m512 w = _mm512_shuffle_f32x4(u[8 + k], u[12 + k], 0xdd);
        a[k] = _mm512_shuffle_f32x4(x, z, 0x88);
        a[8 + k] = _mm512_shuffle_f32x4(x, z, 0xdd);
        a[4 + k] = _mm512_shuffle_f32x4(y, w, 0x88);
        a[12 + k] = _mm512_shuffle_f32x4(y, w, 0xdd);
    }
}

/* sixteen vectors -> the sum of each */
#define TREE(NAME, X, ADD, LO, HI, LO2, HI2, CAST, BACK, SHUF)                                     \
    INLINE X NAME(const X *a) {                                                                    \
        X u[8], v[4];                                                                              \
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)                                        \
            u[j] = ADD(LO(a[2 * j], a[2 * j + 1]), HI(a[2 * j], a[2 * j + 1]));                    \
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)                                        \
            v[k] = ADD(BACK(LO2(CAST(u[2 * k]), CAST(u[2 * k + 1]))),                              \
                       BACK(HI2(CAST(u[2 * k]), CAST(u[2 * k + 1]))));                             \
        X x = ADD(SHUF(v[0], v[1], 0x88), SHUF(v[0], v[1], 0xdd));                                 \
        X y = ADD(SHUF(v[2], v[3], 0x88), SHUF(v[2], v[3], 0xdd));                                 \
        return ADD(SHUF(x, y, 0x88), SHUF(x, y, 0xdd));                                            \
    }
#define SAME(x) (x)
TREE(tree_int, __m512i, _mm512_add_epi32, _mm512_unpacklo_epi32, _mm512_unpackhi_epi32,
     _mm512_unpacklo_epi64, _mm512_unpackhi_epi64, SAME, SAME, _mm512_shuffle_i32x4)
TREE(v_tree, __m512, _mm512_add_ps, _mm512_unpacklo_ps, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
     _mm512_unpackhi_pd, _mm512_castps_pd, _mm512_castpd_ps, _mm512_shuffle_f32x4)

typedef __m512i Sum; /* of numbers that were rounded, exact */
INLINE V v_of_sum(Sum s) { return _mm512_cvtepi32_ps(s); }
INLINE Sum store_rounded(int16_t *p, const float *from, V by, Sum s) { /* 32 numbers, as int16 */
    __m512i x = _mm512_packs_epi32(_mm512_cvtps_epi32(v_load(from) * by),
                                   _mm512_cvtps_epi32(v_load(from + 16) * by));
    x = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x);
    _mm512_storeu_si512(p, x);
    return _mm512_dpwssd_epi32(s, x, _mm512_set1_epi16(1));
}
INLINE void sums_of(const V *a, float *to) { v_store(to, v_tree(a)); }
#elif defined(USE_AVX2)
/* eight vectors -> the sum of each */
#define TREE(NAME, X, ADD, CROSS, SWAP)                                                            \
    INLINE X NAME(const X *a) {                                                                    \
        X x = ADD(ADD(a[0], a[1]), ADD(a[2], a[3])), y = ADD(ADD(a[4], a[5]), ADD(a[6], a[7]));    \
        return CROSS(SWAP(x, y, 0x20), SWAP(x, y, 0x31));                                          \
    }
TREE(tree_int, __m256i, _mm256_hadd_epi32, _mm256_add_epi32, _mm256_permute2x128_si256)
TREE(v_tree, __m256, _mm256_hadd_ps, _mm256_add_ps, _mm256_permute2f128_ps)

INLINE void transpose_sums(__m256 *a) {
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const int from = i / 2 * 4 + i % 2;
        u[i / 2 * 4 + i % 2 * 2] = _mm256_shuffle_ps(t[from], t[from + 2], 0x44);
        u[i / 2 * 4 + i % 2 * 2 + 1] = _mm256_shuffle_ps(t[from], t[from + 2], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        a[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}

typedef __m256i Sum;
INLINE V v_of_sum(Sum s) { return _mm256_cvtepi32_ps(s); }
INLINE Sum store_rounded(int16_t *p, const float *from, V by, Sum s) {
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += 16) {
        __m256i x = _mm256_packs_epi32(_mm256_cvtps_epi32(v_load(from + i) * by),
                                       _mm256_cvtps_epi32(v_load(from + i + 8) * by));
        x = _mm256_permute4x64_epi64(x, 0xd8);
        _mm256_storeu_si256((void *)(p + i), x);
        s = _mm256_add_epi32(s, _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
    }
    return s;
}
INLINE void sums_of(const V *a, float *to) { v_store(to, v_tree(a)); }
#else
typedef V Sum; /* of numbers that were rounded: below 2**24, so exact */
INLINE V v_of_sum(Sum s) { return s; }
INLINE Sum store_rounded(int16_t *p, const float *from, V by, Sum s) {
    for (int i = 0; i < 32; i += LANES) {
        V x = v_round(v_load(from + i) * by);
        v_store_int16(p + i, x);
        s += x;
    }
    return s;
}
INLINE void sums_of(const V *a, float *to) {
    for (int i = 0; i < SUMS; i++) to[i] = v_sum(a[i]);
}
#endif

INLINE V v_exp2(V x) { /* of x <= 0; 0 below 2**-90, before it costs subnormal products */
    static const float terms[6] = {0x1.5f44e4p-10f, 0x1.3b2cc4p-7f, 0x1.c6aed6p-5f,
                                   0x1.ebfbdcp-3f,  0x1.62e43p-1f,  1.0f};
    V y = v_max(x, v_set(-126.0f)), r = v_round(y), f = y - r, p = v_set(0x1.4258ep-13f);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) p = v_fma(p, f, v_set(terms[i]));
    return v_zero_below(v_times_power(p, r), x, -90.0f);
}
INLINE V v_read(const uint8_t *p, int64_t i, int type) { /* LANES numbers from the i-th on */
    if (type == FP16) return v_half(p + 2 * i);
    if (type == BF16) return v_bfloat(p + 2 * i);
    if (type == FP8) return v_float8(p + i);
    return v_load((const float *)p + i);
}

/* Sums of codes times vectors.
 *
 * words: of each page [rows][words per row] at `stride` bytes, of which `width` are contracted
 * next:  what is read after them, for the cache
 * x[f]:  what the codes of field f are multiplied by: int16 [pages] at `page` numbers, each
 *        [chunks of 32 words][halves][4 queries][32]
 * at, add: lane i of a sum is times[i] * sum + add[i]; lane (f * 4 + h) is field f, query h; of
 *        8 bits, which have two fields, lanes 8 to 15 say the same again
 * out:   [4 queries] at `ld` numbers: [fields][plane rows]; more: add to what is there
 */
typedef struct {
    const uint8_t *words[STRIP], *next[STRIP];
    int64_t stride, width, page, ld, plane;
    int pages, rows, more;
    const int16_t *x[4];
    float times[16], add[16];
    float *out;
} Products;

#if defined(USE_AVX512)
/* not _mm512_dpwssd_epi32: gcc 12 moves all sums to other registers and back in every turn of a loop */
#define DOT(i, z, y) __asm__("vpdpwssd %2, %1, %0" : "+v"(a[i]) : "v"(z), "v"(y))
#define DOT_AT(i, z, q) \
    __asm__("vpdpwssd %2, %1, %0" : "+v"(a[i]) : "v"(z), "m"(*(const __m512i *)(q)))

/* fields of z0 and z1, sums from the i-th on; q1 is q0 where both are of one group */
INLINE void two_fields(__m512i *a, int i, __m512i z0, __m512i z1, const int16_t *q0,
                       const int16_t *q1, int paired) {
#pragma GCC unroll 4
    for (int h = 0; h < TILE; h++)
        if (paired) {
            __m512i y = _mm512_load_si512(q0 + 32 * h);
            DOT(i + h, z0, y);
            DOT(i + 4 + h, z1, y);
        } else {
            DOT_AT(i + h, z0, q0 + 32 * h);
            DOT_AT(i + 4 + h, z1, q1 + 32 * h);
        }
}

INLINE void chunk_of_codes(__m512i *a, __m512i x, int bits, int i, const int16_t *const *q, int64_t at,
                           int paired) {
    const __m512i y = _mm512_srli_epi16(x, 8);
#define FIELD(z, bit) _mm512_and_si512(z, _mm512_set1_epi16(((1 << bits) - 1) << bit))
    if (bits == 8) {
        two_fields(a, i, FIELD(x, 0), y, q[0] + at, q[1] + at, paired);
    } else if (bits == 4) {
        two_fields(a, i, FIELD(x, 0), FIELD(x, 4), q[0] + at, q[1] + at, paired);
        two_fields(a, i + 8, FIELD(y, 0), FIELD(y, 4), q[2] + at, q[3] + at, paired);
    } else {
        two_fields(a, i, FIELD(x, 0), FIELD(x, 2), q[0] + at, q[1] + at, paired);
        two_fields(a, i + 8, FIELD(x, 4), FIELD(x, 6), q[2] + at, q[3] + at, paired);
        at += 32 * TILE;
        two_fields(a, i, FIELD(y, 0), FIELD(y, 2), q[0] + at, q[1] + at, paired);
        two_fields(a, i + 8, FIELD(y, 4), FIELD(y, 6), q[2] + at, q[3] + at, paired);
    }
}

INLINE void row_of_codes(__m512i *a, const uint8_t *w, const uint8_t *next, int bits, int i,
                         const int16_t *const *q, int64_t x, int64_t width, int paired) {
    const int64_t chunk = (bits == 2 ? 2 : 1) * 32 * TILE;
    for (; width >= 32; width -= 32, w += 64, next += 64, x += chunk) {
        _mm_prefetch((const char *)next, _MM_HINT_T0);
        chunk_of_codes(a, _mm512_loadu_si512(w), bits, i, q, x, paired);
    }
    if (width)
        chunk_of_codes(a, _mm512_maskz_loadu_epi16((1u << width) - 1, w), bits, i, q, x, paired);
}
typedef __m512i Sums;
#elif defined(USE_AVX2)
/* not intrinsics: gcc 12 adds up products of two chunks first, for which registers do not suffice */
#define DOT_AT(i, z, q)                                     \
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"      \
            : "+x"(a[i]), "=&x"(product)                    \
            : "x"(z), "m"(*(const __m256i *)(q)))
INLINE void two_fields(__m256i *a, int i, __m256i z0, __m256i z1, const int16_t *q0,
                       const int16_t *q1) {
    __m256i product;
#pragma GCC unroll 4
    for (int h = 0; h < TILE; h++) {
        DOT_AT(i + h, z0, q0 + 32 * h);
        DOT_AT(i + 4 + h, z1, q1 + 32 * h);
    }
}

/* sixteen words; of the fields q[0] and q[1], the first of which begins at a bit of a byte, or of
 * the upper byte */
INLINE void chunk_of_codes(__m256i *a, __m256i x, int bits, int bit, int i, const int16_t *const *q,
                           int64_t at) {
    const __m256i y = _mm256_srli_epi16(x, 8), one = bit >= 8 ? y : x;
#define FIELD(z, bit) _mm256_and_si256(z, _mm256_set1_epi16(((1 << bits) - 1) << ((bit) & 7)))
    if (bits == 8) {
        two_fields(a, i, FIELD(x, 0), y, q[0] + at, q[1] + at);
    } else {
        two_fields(a, i, FIELD(one, bit), FIELD(one, bit + bits), q[0] + at, q[1] + at);
        at += 32 * TILE;
        if (bits == 2) two_fields(a, i, FIELD(y, bit), FIELD(y, bit + bits), q[0] + at, q[1] + at);
    }
}

INLINE void row_of_codes(__m256i *a, const uint8_t *w, const uint8_t *next, int bits, int bit, int i,
                         const int16_t *const *q, int64_t x, int64_t width) {
    const int64_t chunk = (bits == 2 ? 2 : 1) * 32 * TILE;
    for (; width >= 32; width -= 32, w += 64, next += 64, x += chunk) {
        if (bit == 0) _mm_prefetch((const char *)next, _MM_HINT_T0);
        chunk_of_codes(a, _mm256_loadu_si256((const void *)w), bits, bit, i, q, x);
        chunk_of_codes(a, _mm256_loadu_si256((const void *)(w + 32)), bits, bit, i, q, x + 16);
    }
    for (; width > 0; width -= 16, w += 32, x += 16) { /* 8 or 16, or 24 */
        __m256i some = {0};
        memcpy(&some, w, width < 16 ? 16 : 32);
        chunk_of_codes(a, some, bits, bit, i, q, x);
    }
}
typedef __m256i Sums;
#endif

#if LANES > 4
/* Lanes of a vector of sums: four queries of one field, then of the next one; where there is one
 * query only, four rows. Lanes that are left take another block of rows. */
INLINE V sums_of_rows(const Products *p, int bits, int row, int field, int paired) {
    const int fields = bits == 8 ? 2 : 4, blocks = LANES / 4 > fields ? 2 : 1;
    const int16_t *const q[4] = {p->x[field], p->x[field + 1], p->x[2], p->x[3]};
    Sums a[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) a[i] = (Sums){0};
    for (int page = 0; page < p->pages; page++)
#pragma GCC unroll 8
        for (int i = 0; i < blocks * (4 / TILE); i++) {
            const int block = i / (4 / TILE), lane = i % (4 / TILE);
            int r = row + lane + block * (TILE == 1 ? 4 : LANES);
            if (r >= p->rows) {
                if (TILE == 4) continue;
                r = row;
            }
            const uint8_t *w = p->words[page] + r * p->stride, *next = p->next[page] + r * p->stride;
#if defined(USE_AVX512)
            row_of_codes(a, w, next, bits, 8 * block + lane, q, page * p->page, p->width, paired);
#else
            row_of_codes(a, w, next, bits, field * bits, lane, q, page * p->page, p->width);
#endif
        }
    V sums = __builtin_convertvector((W)tree_int(a), V);
    return v_fma(sums, v_load(p->times + 4 * field), v_load(p->add + 4 * field));
}

/* `count` numbers of s from the i-th on, to where `left` more have room */
INLINE void put(const Products *p, float *to, const float *s, int count, int left) {
    for (int j = 0; j < count && j < left; j++) to[j] = p->more ? to[j] + s[j] : s[j];
}

INLINE void products_in(const Products *p, int bits, int field, int paired) {
    const int fields = bits == 8 ? 2 : 4, blocks = LANES / 4 > fields ? 2 : 1;
    const int step = blocks * (TILE == 1 ? 4 : LANES);
    for (int row = 0; row < p->rows; row += step) {
        ALIGNED V sums[LANES];
        const int count = TILE == 1 ? 1 : LANES;
        for (int r = 0; r < count && row + r < p->rows; r++)
            sums[r] = sums_of_rows(p, bits, row + r, field, paired);
        if (TILE == 4) transpose_sums(sums);
        for (int i = 0; i < LANES; i += TILE == 1 ? 4 : 1) { /* four rows, or those of a query */
            const int start = row + i / (4 * fields) * (TILE == 1 ? 4 : LANES);
            float *to = p->out + (TILE == 1 ? 0 : i % 4) * p->ld +
                        (field + i / 4) % fields * p->plane + start;
            if (TILE == 1) put(p, to, (float *)sums + i, 4, p->rows - start);
            else put(p, to, (float *)(sums + i), LANES, p->rows - start);
        }
    }
}

INLINE void products_of(const Products *p, int bits) {
    const int paired = LANES == 16 && p->x[0] == p->x[1] && p->x[2] == p->x[3];
    if (paired) products_in(p, bits, 0, 1);
    else products_in(p, bits, 0, 0);
    if (LANES == 8 && bits < 8) products_in(p, bits, 2, 0);
}
#else
INLINE void products_of(const Products *p, int bits) {
    const int fields = bits == 8 ? 2 : 4, halves = bits == 2 ? 2 : 1;
    int16_t words[PART], codes[PART];
    for (int r = 0; r < p->rows; r++) {
        int32_t sums[16] = {0};
        for (int i = 0; i < fields * halves * p->pages; i++) {
            const int page = i / (fields * halves), f = i % fields, half = i / fields % halves;
            const int bit = f * bits + 8 * half, shift = bit & 8, mask = ((1 << bits) - 1) << (bit & 7);
            memcpy(words, p->words[page] + r * p->stride, 2 * p->width);
            for (int64_t c = 0; c < p->width; c++) codes[c] = (uint16_t)words[c] >> shift & mask;
            for (int64_t c = 0; c < p->width; c += 32) {
                const int16_t *q = p->x[f] + page * p->page + (c / 32 * halves + half) * TILE * 32;
                const int64_t count = p->width - c < 32 ? p->width - c : 32;
                for (int h = 0; h < TILE; h++)
                    for (int64_t j = 0; j < count; j++) sums[4 * f + h] += codes[c + j] * q[32 * h + j];
            }
        }
        for (int i = 0; i < fields * TILE; i++) {
            const int f = i / TILE, h = i % TILE;
            float *to = p->out + h * p->ld + f * p->plane + r;
            float s = (float)sums[4 * f + h] * p->times[4 * f + h] + p->add[4 * f + h];
            *to = p->more ? *to + s : s;
        }
    }
}
#endif

static void products(const Products *p, int64_t bits) {
    if (bits == 2) products_of(p, 2);
    else if (bits == 4) products_of(p, 4);
    else products_of(p, 8);
}
