/* Vectors of LANES floats, and products of code words with int16 vectors, in the instructions of a
 * path: 16 lanes are AVX-512, 8 AVX2, 4 are plain C for any machine. What the vectors of the compiler
 * can say, they say for all three. */
#include "pages.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64))) /* a load that crosses lines of a cache takes two */
#define APART static __attribute__((noinline)) /* what few formats need: its frame is not that of all */

enum { SUMS = LANES == 16 ? 16 : 8 }; /* vectors of sums that registers hold */
typedef float V __attribute__((vector_size(4 * LANES)));
typedef float Queries __attribute__((vector_size(4 * TILE)));
typedef int32_t W __attribute__((vector_size(4 * LANES)));
typedef int16_t Short __attribute__((vector_size(2 * LANES)));
typedef uint16_t Word __attribute__((vector_size(2 * LANES)));
typedef int8_t Byte __attribute__((vector_size(LANES)));

INLINE void fetch(const void *p) { __builtin_prefetch(p, 0, 2); } /* the first cache holds this strip */
INLINE void fetch_both(const void *next, const void *soon) { fetch(next), __builtin_prefetch(soon); }
INLINE V v_load(const float *p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void v_store(float *p, V x) { memcpy(p, &x, sizeof x); }
INLINE V v_set(float x) { return x - (V){0}; }
INLINE V v_abs(V a) { return (V)((W)a & 0x7fffffff); }
INLINE V v_round(V a) { return (a + 0x1.8p23f) - 0x1.8p23f; } /* below 2**22; ties to even */

INLINE void v_store_int16(int16_t *p, W x) { /* the low 16 bits */
    const Short h = __builtin_convertvector(x, Short);
    memcpy(p, &h, sizeof h);
}

/* Of a and b: LOW_ONES and HIGH_ONES take the first ones and the last ones of every 128 bits, in turn,
 * LOW_TWOS and HIGH_TWOS two by two, LOW_WORDS and HIGH_WORDS words of 16 bits, EVEN_FOURS and ODD_FOURS every other 128 bits. ACROSS: the first
 * ones of all 128 bits, then the second ones, and so on. IN_ORDER: what was
 * packed of two, one after the other. LARGER: the larger size, of numbers. dot: products of pairs of
 * int16, z being none below 0. eight_words: of every fourth row */
#define WORDS(i) _mm_loadu_si128((const void *)(p + at[i]))
#if LANES == 16
#define MM(name) _mm512_##name
#define IN_ORDER(a) __builtin_shufflevector((__v8di)a, (__v8di)a, 0, 2, 4, 6, 1, 3, 5, 7)
#define LARGER(a, b) _mm512_range_ps(a, b, 11)
#define EVEN_FOURS(a, b) (V) _mm512_shuffle_f32x4(a, b, 0x88)
#define ODD_FOURS(a, b) (V) _mm512_shuffle_f32x4(a, b, 0xdd)
#define ACROSS(a) __builtin_shufflevector(a, a, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
/* not _mm512_dpwssd_epi32: gcc 12 moves all sums to other registers and back in every turn of a loop */
INLINE void dot(W *sum, W z, W y) { __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(z), "v"(y)); }
typedef __m256i Half;
typedef __m512i Whole;
INLINE V eight_words(const uint8_t *p, const int64_t *at) {
    __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(WORDS(0)), WORDS(1), 1);
    x = _mm512_inserti32x4(x, WORDS(2), 2);
    return (V)_mm512_inserti32x4(x, WORDS(3), 3);
}
#elif LANES == 8
#define MM(name) _mm256_##name
#define IN_ORDER(a) __builtin_shufflevector((__v4di)a, (__v4di)a, 0, 2, 1, 3)
#define LARGER(a, b) v_max(v_abs(a), b)
#define EVEN_FOURS(a, b) (V) _mm256_permute2f128_ps(a, b, 0x20)
#define ODD_FOURS(a, b) (V) _mm256_permute2f128_ps(a, b, 0x31)
#define ACROSS(a) __builtin_shufflevector(a, a, 0, 4, 1, 5, 2, 6, 3, 7)
/* not intrinsics: gcc 12 adds up products of two chunks first, for which registers do not suffice */
INLINE void dot(W *sum, W z, W y) {
    W product;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(*sum), "=&x"(product) : "x"(z), "x"(y));
}
typedef __m128i Half;
typedef __m256i Whole;
INLINE V eight_words(const uint8_t *p, const int64_t *at) {
    return (V)_mm256_inserti128_si256(_mm256_castsi128_si256(WORDS(0)), WORDS(1), 1);
}
#endif
#if LANES > 4
#define WIDEN(a) (W) MM(cvtepu16_epi32)((Half)a) /* gcc 12 converts it in halves */
#define LOW_WORDS(a, b) (W) MM(unpacklo_epi16)((Whole)a, (Whole)b)
#define HIGH_WORDS(a, b) (W) MM(unpackhi_epi16)((Whole)a, (Whole)b)
#define LOW_ONES(a, b) (V) MM(unpacklo_ps)(a, b)
#define HIGH_ONES(a, b) (V) MM(unpackhi_ps)(a, b)
#define LOW_TWOS(a, b) (V) MM(shuffle_ps)(a, b, 0x44)
#define HIGH_TWOS(a, b) (V) MM(shuffle_ps)(a, b, 0xee)
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
INLINE void v_store_rounded(int16_t *p, V a, V b, W *sum) {
    const __auto_type x = IN_ORDER(MM(packs_epi32)(MM(cvtps_epi32)(a), MM(cvtps_epi32)(b)));
    memcpy(p, &x, sizeof x);
    dot(sum, (W){0} + 0x10001, (W)x);
}
#else
#define WIDEN(a) __builtin_convertvector(a, W)
#define LOW_WORDS(a, b) (W) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_WORDS(a, b) (W) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_ONES(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH_ONES(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LOW_TWOS(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define HIGH_TWOS(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)
#define EVEN_FOURS(a, b) a
#define ODD_FOURS(a, b) b
#define ACROSS(a) a
#define LARGER(a, b) v_max(v_abs(a), b)
#if defined(__SSE2__)
INLINE void dot(W *sum, W z, W y) { *sum += (W)_mm_madd_epi16((__m128i)z, (__m128i)y); }
#else
INLINE void dot(W *sum, W z, W y) { *sum += (z & 0xffff) * (y << 16 >> 16) + (z >> 16) * (y >> 16); }
#endif
INLINE V eight_words(const uint8_t *p, const int64_t *at) { return v_load((const void *)(p + *at)); }
INLINE V v_fma(V a, V b, V c) { return a * b + c; }
INLINE V v_fused(V a, V b, V c) { /* rounded once, on any machine */
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
INLINE V v_max(V a, V b) { return (V)(((W)a & (a > b)) | ((W)b & ~(a > b))); }
INLINE V v_min(V a, V b) { return (V)(((W)a & (a < b)) | ((W)b & ~(a < b))); }
INLINE V v_half(const void *p) { /* fp16 counts exponents from 15, fp32 from 127 */
    Word h;
    const W w = WIDEN(*(const Word *)memcpy(&h, p, sizeof h)), rest = (w & 0x7fff) << 13;
    const V x = (V)(rest + (0x70000000 & (rest >= 0x0f800000))); /* infinite, or no number */
    return (V)((W)(x * 0x1p112f) | (w & 0x8000) << 16);
}
INLINE void v_store_half(void *p, V a) { /* to nearest, ties to even */
    const W u = (W)a & 0x7fffffff, usual = (u - 0x37fff001 + (u >> 13 & 1)) >> 13;
    const W tiny = (W)((V)u + 0.5f) - 0x3f000000; /* this rounds what is below fp16's normal numbers */
    const W small = u < 0x38800000, large = usual > 0x7c00;
    const W most = (0x7c00 & large) | (usual & ~large), bits = (tiny & small) | (most & ~small);
    v_store_int16(p, bits | ((W)a >> 16 & 0x8000) | (0x200 & (a != a))); /* NaN stays one */
}
INLINE void v_store_rounded(int16_t *p, V a, V b, W *sum) { /* one after the other, added to a sum */
    const W x = __builtin_convertvector(v_round(a), W), y = __builtin_convertvector(v_round(b), W);
    v_store_int16(p, x), v_store_int16(p + LANES, y);
    *sum += x + y;
}
#endif

INLINE V v_bfloat(const void *p) {
    Word h;
    return (V)(WIDEN(*(const Word *)memcpy(&h, p, sizeof h)) << 16);
}
INLINE V v_float8(const void *p) { /* 2**-8 of it: fp16 counts exponents from 15, e4m3 from 7 */
    Byte b;
    memcpy(&b, p, sizeof b);
    Short h = (__builtin_convertvector(b, Short) << 7) & -0x4080;
    return v_half(&h);
}
/* Of each of four vectors, in every 128 bits: its sum, or its largest number */
INLINE V v_join(V a, V b, int sum) { return sum ? a + b : v_max(a, b); }
INLINE V v_fours(const V *a, int sum) {
    const V u = v_join(LOW_ONES(a[0], a[1]), HIGH_ONES(a[0], a[1]), sum);
    const V v = v_join(LOW_ONES(a[2], a[3]), HIGH_ONES(a[2], a[3]), sum);
    V all = v_join(LOW_TWOS(u, v), HIGH_TWOS(u, v), sum);
    for (int n = 4; n < LANES; n *= 2) all = v_join(EVEN_FOURS(all, all), ODD_FOURS(all, all), sum);
    return all;
}
INLINE float v_sum(V a) { return v_fours((V[4]){a, a, a, a}, 1)[0]; }

/* LANES vectors -> the sum of each */
INLINE V v_sums(const V *a) {
    V sums[LANES / 4];
    for (int k = 0; k < LANES / 4; k++, a += 4) {
        const V u = LOW_ONES(a[0], a[1]) + HIGH_ONES(a[0], a[1]);
        const V v = LOW_ONES(a[2], a[3]) + HIGH_ONES(a[2], a[3]);
        sums[k] = LOW_TWOS(u, v) + HIGH_TWOS(u, v);
    }
    for (int n = LANES / 8; n; n /= 2)
        for (int k = 0; k < n; k++)
            sums[k] = EVEN_FOURS(sums[2 * k], sums[2 * k + 1]) + ODD_FOURS(sums[2 * k], sums[2 * k + 1]);
    return sums[0];
}

INLINE void v_transpose4(V *a) { /* four vectors, in every 128 bits */
    const V low = LOW_ONES(a[0], a[1]), high = HIGH_ONES(a[0], a[1]);
    const V next_low = LOW_ONES(a[2], a[3]), next_high = HIGH_ONES(a[2], a[3]);
    a[0] = LOW_TWOS(low, next_low), a[1] = HIGH_TWOS(low, next_low);
    a[2] = LOW_TWOS(high, next_high), a[3] = HIGH_TWOS(high, next_high);
}
INLINE void v_transpose(V *a) { /* LANES vectors */
    V t[LANES];
    for (int i = 0; i < LANES; i += 4) v_transpose4(a + i);
    for (int n = 4; n < LANES; n *= 2) { /* all else moves 128 bits */
        for (int i = 0; i < LANES / 2; i++) {
            const V *from = a + i / 4 * 8 + i % 4;
            t[i] = EVEN_FOURS(from[0], from[4]), t[i + LANES / 2] = ODD_FOURS(from[0], from[4]);
        }
        memcpy(a, t, sizeof t);
    }
}

INLINE V v_exp2(V x) { /* of x <= 0; 0 below 2**-90, before it costs subnormal products */
    static const float terms[6] = {0x1.5f44e4p-10f, 0x1.3b2cc4p-7f, 0x1.c6aed6p-5f,
                                   0x1.ebfbdcp-3f,  0x1.62e43p-1f,  1.0f};
    V whole = x + 0x1.8p23f, f = x - (whole - 0x1.8p23f), p = v_set(0x1.4258ep-13f);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) p = v_fma(p, f, v_set(terms[i]));
    return (V)(((W)p + ((W)whole << 23)) & ~(x < -90.0f)); /* its exponent counts on */
}
INLINE V v_read(const uint8_t *p, int64_t i, int type) { /* LANES numbers from the i-th on */
    if (type == FP16) return v_half(p + 2 * i);
    if (type == BF16) return v_bfloat(p + 2 * i);
    if (type == FP8) return v_float8(p + i);
    return v_load((const float *)p + i);
}
INLINE void v_write(uint8_t *p, int64_t i, V x, int type) { /* rounded to nearest, ties to even */
    const W u = (W)x, up = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    if (type == FP16) v_store_half(p + 2 * i, x);
    else if (type == BF16) v_store_int16((int16_t *)p + i, (up & (x == x)) | (0x7fff & (x != x)));
    else v_store((float *)p + i, x);
}

/* Sums of codes times vectors.
 *
 * A part is some words of each row: `width` of them, in rows that are `stride` bytes apart
 * soon: how far on is what is read after them, for the first cache; next: a strip later, for the second
 * at:   where their columns begin in a vector: of 2 bits those of both halves of a word
 */
typedef struct {
    const uint8_t *words;
    int64_t soon, next, stride, width, at[2];
} Part;

/* x:    what codes of field f are multiplied by: int16 [4 queries] at OPERANDS numbers
 * times, add: [fields], of a sum s: s * times + add
 * out:  [4 queries] at LINE numbers: [fields] at `plane` numbers: rows `first` to `end` */
typedef struct {
    Part parts[2 * STRIP];
    const int16_t *x[4];
    Queries times[4], add[4];
    float *out;
    int64_t plane;
    int count, fields, bits, runs, first, end; /* runs: there were before, of other bits */
} Products;

typedef uint16_t Codes __attribute__((vector_size(4 * LANES)));
enum { FIELDS = LANES == 16 ? 4 : 2 }; /* whose sums registers hold, of four queries */
/* Whether the first field of a byte is not parted from the others, which are multiplied by the same: what
 * they add to its sum is taken away at the end */
INLINE int is_whole(int bits, int same) { return bits * (same + 1) >= 8; }
/* Two words of each of LANES rows: FIELDS fields of them, times the columns that x has at `to`. A field
 * stays where its byte has it, and a sum of a row in one lane. same: x is, of fields f and f & ~same */
INLINE void add_codes(W *a, Codes words, int bits, int field, const int16_t *const *x, const int64_t *to,
                      int same) {
#pragma GCC unroll 32
    for (int n = 0; n < 2 * TILE * 8 / bits; n++) { /* of a byte, a query and a field of the byte */
        const int byte = n / (TILE * 8 / bits), h = n * bits / 8 % TILE, i = n % (8 / bits);
        const int f = (bits == 2 ? i : byte * 8 / bits + i) - field;
        if (f < 0 || f >= FIELDS) continue;
        Codes y = byte ? words >> 8 : words & 0xff;
        if (i || !is_whole(bits, same)) y &= (uint16_t)(((1 << bits) - 1) << i * bits);
        int32_t b;
        memcpy(&b, x[f & ~same] + to[bits == 2 ? byte : 0] + h * OPERANDS, sizeof b);
        dot(a + 4 * f + h, (W)y, (W){0} + b);
    }
}

/* Rows from `row` on; there are `rows` of them: lanes without one take another one's words */
INLINE void add_part(W *a, const Part *p, int64_t row, int64_t rows, int bits, int field,
                     const int16_t *const *x, int same) {
    const uint8_t *from = p->words + row * p->stride, *line = from;
    int64_t at[LANES / 4];
    for (int i = 0; i < LANES / 4; i++) at[i] = (4 * i < rows ? 4 * i : 0) * p->stride;
    for (int64_t c = 0; c < p->width; c += 8, from += 16) {
        V words[4];
#pragma GCC unroll 4
        for (int i = 0; i < LANES / 4 && field == 0; i++, line += 64) fetch_both(line + p->next, line + p->soon);
        for (int i = 0; i < 4; i++) words[i] = eight_words(from + i * p->stride, at);
        v_transpose4(words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { /* words 2 i and 2 i + 1 of all rows */
            const int64_t to[2] = {p->at[0] + c + 2 * i, p->at[1] + c + 2 * i};
            add_codes(a, (Codes)words[i], bits, field, x, to, same);
        }
    }
}

INLINE void products_in(const Products *p, int bits, int field, int same) {
    const int16_t *const *x = p->x + field;
    for (int64_t row = p->first; row < p->end; row += LANES) {
        const int64_t start = row + LANES < p->plane ? row : p->plane > LANES ? p->plane - LANES : 0;
        const int64_t lane = row - start, rows = p->plane - start, most = LANES - lane;
        const int64_t left = p->end - row < most ? p->end - row : most;
        W a[4 * FIELDS];
        for (int i = 0; i < 4 * FIELDS; i++) a[i] = (W){0};
        for (const Part *part = p->parts; part < p->parts + p->count; part++)
            add_part(a, part, start, rows, bits, field, x, same);
#pragma GCC unroll 16
        for (int i = 0, n; i < 4 * FIELDS; i++)
            if ((n = i / 4 % (8 / bits)) && is_whole(bits, same)) a[i - 4 * n] -= a[i];
#pragma GCC unroll 16
        for (int i = 0; i < 4 * FIELDS; i++) { /* of a field and a query */
            const int f = field + i / 4, h = i % 4;
            if (h >= TILE || f * bits >= 16) continue;
            const V y = v_fma(__builtin_convertvector(a[i], V), v_set(p->times[f][h]), v_set(p->add[f][h]));
            float *to = p->out + h * LINE + f * p->plane + row;
            if (left == LANES) v_store(to, y);
            else memcpy(to, (float *)&y + lane, 4 * left);
        }
    }
}

/* Sums of the codes of K times weights of tokens, for values that are channels of K: tokens `first` to `end`
 * of each page, and channels `from` to `to`, one in each lane. Tokens are even in number, and in pairs
 *
 * x:      weights of the tokens of a page behind those of the page before: int16 [4 queries] at OPERANDS
 * out:    [4 queries] at LINE numbers: a sum s becomes s * times + add
 */
typedef struct {
    const Side *k;
    const uint8_t *pages[STRIP];
    int64_t count, first, end, from, to;
    const int16_t *x;
    Queries times, add;
    float *out;
} Lying;

enum { CHANNELS = 2 * LANES }; /* whose words are read at once */

/* Tokens of one bit-field, from `words` on: sums of the first four channels of every eight, and of the others */
INLINE void add_tokens(W *low, W *high, const uint8_t *words, int64_t stride, int64_t tokens,
                       int shift, int bits, const int16_t *x) {
    const Codes mask = (Codes){0} + (uint16_t)((1 << bits) - 1);
    for (int64_t t = 0; t < tokens; t += 2, words += 2 * stride) {
        Codes y, z;
        memcpy(&y, words, sizeof y), memcpy(&z, words + stride, sizeof z);
        y = y >> shift & mask, z = z >> shift & mask;
        const W first = LOW_WORDS(y, z), second = HIGH_WORDS(y, z);
#pragma GCC unroll 4
        for (int h = 0; h < TILE; h++) {
            int32_t b;
            memcpy(&b, x + t + h * OPERANDS, sizeof b);
            dot(low + h, first, (W){0} + b), dot(high + h, second, (W){0} + b);
        }
    }
}

/* Sums of CHANNELS channels from `start` on, of a half of the words; of them `from` to `to` are stored */
INLINE void sum_channels(const Lying *s, int64_t half, int64_t start, int64_t from, int64_t to) {
    const Side *k = s->k;
    const int64_t halves = k->bits == 2 ? 2 : 1, fields = k->bits == 8 ? 2 : 4;
    const int64_t plane = k->rows / fields, words = k->columns / halves, stride = 2 * words;
    W low[TILE], high[TILE];
    for (int h = 0; h < TILE; h++) low[h] = high[h] = (W){0};
    for (int64_t page = 0; page < s->count; page++)
        for (int64_t f = s->first / plane; f * plane < s->end; f++) {
            const int64_t t = f * plane > s->first ? f * plane : s->first;
            const int64_t last = (f + 1) * plane < s->end ? (f + 1) * plane : s->end;
            const uint8_t *at = s->pages[page] + k->codes + (t - f * plane) * stride + 2 * (start - half * words);
            add_tokens(low, high, at, stride, last - t, (int)(f * k->bits + 8 * half), (int)k->bits,
                       s->x + page * k->rows + t);
        }
    for (int h = 0; h < TILE; h++)
        for (int i = 0; i < CHANNELS; i += 4) {
            const V sums = __builtin_convertvector(i % 8 ? high[h] : low[h], V);
            const V y = v_fma(sums, v_set(s->times[h]), v_set(s->add[h]));
            const int64_t c = start + i;
            if (c >= from && c < to) memcpy(s->out + h * LINE + c, (const float *)&y + i / 8 * 4, 16);
        }
}

static void sum_lying(const Lying *s) {
    const int64_t halves = s->k->bits == 2 ? 2 : 1, words = s->k->columns / halves;
    for (int64_t half = 0; half < halves; half++) {
        const int64_t end = (half + 1) * words, to = s->to < end ? s->to : end;
        int64_t c = s->from > half * words ? s->from : half * words;
        for (; c < to; c += CHANNELS) sum_channels(s, half, c < end - CHANNELS ? c : end - CHANNELS, c, to);
    }
}

INLINE void products_of(const Products *p, int bits, int field) {
    const int pairs = p->x[0] == p->x[1] && p->x[2 % p->fields] == p->x[3 % p->fields];
    if (FIELDS == 4 && pairs && p->x[0] == p->x[2 % p->fields]) products_in(p, bits, field, 3);
    else if (pairs) products_in(p, bits, field, 1);
    else products_in(p, bits, field, 0);
}

static void products(const Products *p) {
    if (p->bits == 8) products_of(p, 8, 0);
    else if (p->bits == 4) products_of(p, 4, 0);
    else products_of(p, 2, 0);
    if (FIELDS == 2 && p->bits == 4) products_of(p, 4, 2);
    if (FIELDS == 2 && p->bits == 2) products_of(p, 2, 2);
}
