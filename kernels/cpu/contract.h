/* Codes and numbers of pages contracted with vectors, of four queries at a time. Scales go into the
 * vector that codes are contracted with, zeros into one number. That vector is rounded to int16 of its
 * largest number, the sums of products are exact. */
#include "simd.h"

typedef struct { /* vectors as int16, for each group */
    ALIGNED int16_t x[TILE][OPERANDS];
    Queries step[MAX_GROUPS], bias[MAX_GROUPS], sum[MAX_GROUPS];
} Operand;

typedef struct { /* what a page needs while it is computed; float rows have room for a whole V */
    ALIGNED float s[TILE][LINE], out[TILE][LINE], part[4][LINE]; /* part: or a whole A */
    ALIGNED float lowered[MAX_RANK][MAX_TOKENS];
    Queries sparse[MAX_DIM];
    ALIGNED float rows[TILE][LINE];
    Operand v;
} Room;

static void read_halves(float *to, const uint8_t *from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) v_store(to + i, v_half(from + 2 * i));
    for (uint16_t x[LANES] = {0}; i < count; i++) memcpy(x, from + 2 * i, 2), to[i] = v_half(x)[0];
}

static int halves_of(const Side *s) { return s->bits == 2 ? 2 : 1; }
static float middle_of(const Side *s) {
    return s->zero < 0 ? -(float)s->center : (float)((1 << s->bits) - 1) / 2;
}

static float float8_scale(const Side *s, const uint8_t *block) { /* of what v_float8 reads */
    float scale;
    memcpy(&scale, block + s->scale, 4);
    return 256 * scale;
}

/* Columns of vectors up to `end` and from the span before it on, and the middle of their codes: these
 * are then taken from there, which halves the error of a rounded vector */
typedef struct { int64_t end; float middle; } Span;

/* x [4][LINE], columns from `first` on, as int16 in group g of an operand, from `to` on; the zeros that
 * make a pair of the last vector of a span are written over by what follows it */
static void round_group(const float *x, int64_t first, const Span *spans, int count, const V *mosts,
                        V *bias, int64_t g, int64_t to, Operand *op) {
    const int64_t columns = spans[count - 1].end - first;
    const float limit = columns > PART ? 32767.0f * PART / columns : 32767.0f;
    const V all = v_fours(mosts, 0);
    Queries most;
    memcpy(&most, &all, sizeof most);
    most += 1e-30f;
    const Queries inverse = limit / most, step = most * (1 / limit);
    op->step[g] = step;
    for (int h = 0; h < TILE; h++) {
        V rounded = v_set(0), by = v_set(inverse[h]);
        int16_t *place = op->x[h] + to - first;
        int64_t c = first;
        for (const Span *span = spans; span < spans + count; span++) {
            W sum = {0};
            for (; c < span->end; c += 2 * LANES) {
                const V a = v_load(x + h * LINE + c), b = v_load(x + h * LINE + c + LANES);
                v_store_rounded(place + c, a * by, c + LANES < span->end ? b * by : v_set(0), &sum);
            }
            c = span->end;
            rounded = v_fma(__builtin_convertvector(sum, V), v_set(span->middle), rounded);
        }
        bias[h] = bias[h] - v_set(step[h]) * rounded;
    }
    const V sums = v_fours(bias, 1);
    memcpy(op->bias + g, &sums, sizeof *op->bias);
}

/* Blocks of some pages, what is read after each, and in its place in the strip that follows */
typedef struct {
    const uint8_t *blocks[STRIP], *soon[STRIP], *next[STRIP];
    int count;
} Strip;

/* The operand of columns with a scale for groups of rows: of one page in bands, or of some pages;
 * a band without codes has the means of its columns; x [4][LINE] */
APART void fold_columns(const Side *bands, int count, const Strip *strip, const float *x, Room *room,
                         Operand *op) {
    for (int64_t g = 0; g < bands->rows / bands->group; g++) {
        V most[4], bias[4];
        Span spans[MAX_BANDS];
        int used = 0;
        int64_t at = 0;
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) most[h] = bias[h] = v_set(0);
        for (const Side *s = bands; s < bands + count; s++) {
            const int64_t columns = s->columns, group = 2 * g * columns;
            const int coded = s->bits != 0, zeroed = s->zero >= 0;
            const V middle = v_set(coded ? middle_of(s) : 1);
            for (int page = 0; page < strip->count; page++, at += columns) {
                const uint8_t *scale = strip->blocks[page] + s->scale + group;
                const uint8_t *zero = strip->blocks[page] + s->zero + group;
                const int64_t ahead = strip->next[page] - strip->blocks[page];
                for (int64_t c = 0; c < columns; c += LANES) {
                    if (c % 32 == 0)
                        fetch(scale + ahead + 2 * c), fetch(zero + ahead + 2 * c);
                    V by = v_half(scale + 2 * c), z = zeroed || !coded ? middle : v_set(0);
                    if (zeroed) z = z + v_half(zero + 2 * c);
#pragma GCC unroll 4
                    for (int h = 0; h < TILE; h++) {
                        const V t = v_load(x + h * LINE + at + c) * by;
                        bias[h] = v_fma(t, z, bias[h]);
                        v_store(room->rows[h] + at + c, t);
                        if (coded) most[h] = LARGER(t, most[h]);
                    }
                }
            }
            if (s->bits) spans[used++] = (Span){at, middle_of(s)};
        }
        round_group(room->rows[0], 0, spans, used, most, bias, g, g * at, op);
    }
}

/* The operand where each row has a scale, for groups of columns */
static void fold_rows(const Side *s, float (*x)[LINE], Operand *op) {
    const V middle = v_set(s->zero >= 0 ? middle_of(s) : 0); /* 0 times what is no number is none */
    for (int h = 0; h < TILE; h++) memset(op->x[h] + ZEROS, 0, sizeof *op->x - 2 * ZEROS);
    for (int64_t g = 0; g < s->columns / s->group; g++) {
        const Span span = {(g + 1) * s->group, middle_of(s)};
        V most[4] = {0}, bias[4] = {0}, all[4] = {0};
        for (int h = 0; h < TILE; h++) {
            for (int64_t c = g * s->group; c < span.end; c += LANES) {
                V t = v_load(x[h] + c);
                most[h] = LARGER(t, most[h]);
                all[h] = all[h] + t;
            }
            bias[h] = all[h] * middle;
        }
        const V sums = v_fours(all, 1);
        memcpy(op->sum + g, &sums, sizeof *op->sum);
        round_group(x[0], g * s->group, &span, 1, most, bias, g, g * s->group, op);
    }
}

/* Columns first to end of block i are contracted, with vectors that have its first one at `at` */
static void add_parts(Products *p, const Side *s, const Strip *in, int i, int64_t at, int64_t first, int64_t end) {
    const uint8_t *block = in->blocks[i], *soon = in->soon[i], *next = in->next[i];
    const int64_t words = s->columns / halves_of(s), whole = end - first == s->columns;
    for (int half = 0; half < (whole ? 1 : halves_of(s)); half++) {
        const int64_t start = half * words, stop = start + words;
        const int64_t c = first > start ? first : start, last = whole || end > stop ? stop : end;
        if (c >= last) continue;
        const int64_t place = s->codes + 2 * (c - start);
        Part *part = p->parts + p->count++;
        *part = (Part){block + place, soon - block, next - block, 2 * words, last - c, {ZEROS, ZEROS}};
        part->at[half] = at + c;
        if (whole) part->at[1] = at + words;
    }
}

/* Products of parts with group g of an operand; or, below 0, with the groups that rows belong to, of
 * `columns` each */
static void multiply(Products *p, const Side *s, const Operand *op, int64_t g, int64_t columns, float *out) {
    p->fields = p->bits == 8 ? 2 : 4, p->plane = s->rows / p->fields, p->out = out;
    for (p->first = 0; p->first < p->plane; p->first = p->end) {
        p->end = (int)p->plane; /* as far as every field stays in its group */
        for (int f = 0; f < p->fields; f++) {
            const int64_t group = g < 0 ? (f * p->plane + p->first) / s->group : g;
            const int64_t last = g < 0 ? (group + 1) * s->group - f * p->plane : p->end;
            if (last < p->end) p->end = (int)last;
            p->x[f] = op->x[0] + (g < 0 ? group * columns : 0);
            p->times[f] = op->step[group] * (1.0f / (float)(1 << f * p->bits % 8));
            p->add[f] = p->runs ? (Queries){0} : op->bias[group];
        }
        products(p);
    }
}

/* In a run for each width of codes; `more` is room for what the second one adds */
static void contract_columns(const Side *bands, int count, const Strip *strip, const Operand *op,
                             float (*more)[LINE], float (*out)[LINE]) {
    Products p;
    p.runs = 0; /* and not all of it, by rep stos */
    for (p.bits = 2; p.bits <= 8; p.bits *= 2) {
        int64_t at = p.count = 0;
        for (const Side *s = bands; s < bands + count; s++)
            for (int i = 0; i < strip->count && s->bits; i++, at += s->columns)
                if (s->bits == p.bits) add_parts(&p, s, strip, i, at, 0, s->columns);
        if (!p.count) continue;
        multiply(&p, bands, op, -1, at, (p.runs ? more : out)[0]);
        for (int h = 0; h < TILE && p.runs; h++)
            for (int64_t r = 0; r < bands->rows; r++) out[h][r] += more[h][r];
        p.runs++;
    }
}

/* What rows have in one group of columns, in `part`, times their scales of it: out [4][LINE], or more of it */
static void scale_rows(const Side *s, const uint8_t *block, const Operand *op, int64_t g, int64_t rows,
                       float (*part)[LINE], int more, float *out) {
    for (int64_t r = 0; r < rows; r += LANES) {
        const int64_t at = 2 * (g * s->rows + r);
        const V scale = v_half(block + s->scale + at);
        const V zero = s->zero >= 0 ? v_half(block + s->zero + at) : v_set(0);
        for (int h = 0; h < TILE; h++) {
            V y = v_load(part[h] + r);
            if (s->zero >= 0) y = v_fma(zero, v_set(op->sum[g][h]), y);
            y = y * scale;
            if (more) y = y + v_load(out + h * LINE + r);
            v_store(out + h * LINE + r, y);
        }
    }
}

static void contract_rows(const Side *s, const Strip *strip, const Operand *op, Room *room, float *out) {
    const uint8_t *block = strip->blocks[0];
    for (int64_t g = 0; g < s->columns / s->group; g++) {
        Products p;
        p.count = p.runs = 0, p.bits = (int)s->bits;
        add_parts(&p, s, strip, 0, 0, g * s->group, (g + 1) * s->group);
        multiply(&p, s, op, g, 0, room->part[0]);
        scale_rows(s, block, op, g, s->rows, room->part, g > 0, out);
    }
}

/* Weights [4][LINE] times the values of a strip, which are the first `channels` of K: out [4][LINE]. v: K
 * lying, whose columns are tokens; home: where shared scales are, or NULL */
APART void contract_latents(const Side *k, const Side *v, const Strip *strip, const uint8_t *home,
                            int64_t channels, Room *room, float *out) {
    Operand *op = &room->v;
    Lying s = {.k = k, .end = v->columns, .x = op->x[0], .out = out};
    if (v->by == BY_COLUMN) { /* groups of channels share the weights times scales of tokens */
        memcpy(s.pages, strip->blocks, sizeof s.pages);
        s.count = strip->count;
        fold_columns(v, 1, strip, room->s[0], room, op);
        for (int64_t g = 0; s.from < channels; g++, s.from = s.to, s.x += s.count * v->columns) {
            s.to = s.from + v->group < channels ? s.from + v->group : channels;
            s.times = op->step[g], s.add = op->bias[g];
            sum_lying(&s);
        }
        return;
    }
    s.count = 1, s.to = channels, s.out = room->part[0];
    for (int i = 0; i < strip->count; i++) {
        s.pages[0] = strip->blocks[i];
        fold_rows(v, (float(*)[LINE])(room->s[0] + i * v->columns), op);
        for (int64_t g = 0; g < v->columns / v->group; g++) {
            s.first = g * v->group, s.end = s.first + v->group;
            s.times = op->step[g], s.add = op->bias[g];
            sum_lying(&s);
            scale_rows(v, home ? home : s.pages[0], op, g, channels, room->part, i || g, out);
        }
    }
}

/* Rows of numbers times vectors x [TILE][LINE]: out [TILE][LINE]; `count` is a multiple of 16 */
INLINE void multiply_numbers(int type, const uint8_t *rows, const uint8_t *next, int64_t count,
                             int64_t columns, const float *x, float times, float *out) {
    enum { AT_ONCE = SUMS / TILE };
    const int64_t size = type == FP32 ? 4 : type == FP8 ? 1 : 2, stride = size * columns;
    for (int64_t r = 0; r < count; r += AT_ONCE) {
        V a[SUMS];
        for (int i = 0; i < SUMS; i++) a[i] = v_set(0);
        for (int64_t c = 0; c < columns; c += LANES) {
            V y[AT_ONCE];
            const int64_t at = r * stride + c * AT_ONCE * size, after = at + 2 * AT_ONCE * stride;
            for (int i = 0; i < LANES * AT_ONCE * size; i += 64) __builtin_prefetch(rows + after + i), fetch(next + at + i);
#pragma GCC unroll 16
            for (int i = 0; i < AT_ONCE; i++) y[i] = v_read(rows + (r + i) * stride, c, type);
#pragma GCC unroll 4
            for (int h = 0; h < TILE; h++) {
                V z = v_load(x + h * LINE + c);
#pragma GCC unroll 16
                for (int i = 0; i < AT_ONCE; i++)
                    a[AT_ONCE * h + i] = v_fma(y[i], z, a[AT_ONCE * h + i]);
            }
        }
        float sums[SUMS];
        for (int i = 0; i < SUMS; i += LANES) v_store(sums + i, v_sums(a + i));
        for (int i = 0; i < SUMS; i++) out[i / AT_ONCE * LINE + r + i % AT_ONCE] = sums[i] * times;
    }
}
/* a call of F for each type that there is, known to the compiler */
#define BY_TYPE(type, F, ...)                      \
    if (type == FP16) F(FP16, __VA_ARGS__);        \
    else if (type == BF16) F(BF16, __VA_ARGS__);   \
    else if (type == FP32) F(FP32, __VA_ARGS__);   \
    else F(FP8, __VA_ARGS__)
