/* Attention on pages, four queries at a time. One softmax runs over all tables, in the order of tokens;
 * what a query sees of a page depends on nothing but the query, so neither does its answer: a page that
 * it does not see leaves its state as it was, to the bit. */
#include "corrections.h"

typedef struct {
    ALIGNED float q[TILE][LINE], o[TILE][LINE]; /* q times scale * log2(e); o not divided yet */
    float turned[TILE][LINE], total[TILE][16], top[TILE], cap;
    float done[TILE][LINE], done_top[TILE]; /* o of what is not turned, as of these tops */
    float low_q[TILE][MAX_RANK], low_v[TILE][MAX_RANK];
    int lo[TILE], hi[TILE], first, end, rows;
    const uint8_t *segment; /* what is gathered is in its terms; or NULL */
    Operand k;
} Tile;

static void clear(float (*x)[LINE], int64_t dim) { for (int h = 0; h < TILE; h++) memset(x[h], 0, 4 * dim); }

/* What queries have to do with a segment, when its first page comes */
APART void enter_segment(Tile *t, const Format *f, const uint8_t *segment, Room *room) {
    const Side *k = f->k;
    t->segment = segment;
    const float *x = k->turn ? t->turned[0] : t->q[0];
    for (int64_t c = 0; f->order >= 0 && c < f->head_dim; c++) {
        int16_t from;
        memcpy(&from, segment + f->order + 2 * c, 2);
        for (int h = 0; h < TILE; h++) t->turned[h][c] = t->q[h][from & (f->head_dim - 1)];
    }
    if (k->turn) turn(k, segment, t->q[0], t->turned[0], f->head_dim, 0);
    memset(t->low_q, 0, sizeof t->low_q), memset(t->low_v, 0, sizeof t->low_v);
    for (int64_t d = 0; k->rank && d < f->head_dim; d += MAX_TOKENS) {
        const uint8_t *basis = segment + k->b + 2 * d * k->rank;
        const int64_t count = lay_factor(basis, basis, f->head_dim - d, k->rank, room);
        lower(t->q[0] + d, count, k->rank, room, t->low_q);
    }
    if (k->shared) fold_columns(k, 1, &(Strip){{segment}, {0}, {segment}, 1}, x, room, &t->k);
    if (k->by == BY_ROW && k->turn) fold_rows(k, t->turned, &t->k);
}

/* What is gathered in terms of a segment becomes output; last: of a table. Signs are those of all */
APART void leave_segment(Tile *t, const Format *f, int last, Room *room) {
    const Side *v = &f->v;
    const uint8_t *segment = t->segment;
    if (v->turn || (last && f->signs >= 0)) { /* o, turned back, joins what is not turned */
        float back[TILE][LINE], down[16] = {0};
        if (v->turn) turn(v, segment, t->o[0], back[0], f->head_dim, 1);
        else turn_back(f, segment, t->o, back);
        for (int h = 0; h < TILE; h++) down[h] = t->done_top[h] - t->top[h];
        v_store(down, v_exp2(v_load(down)));
        for (int h = 0; h < TILE; h++)
            for (int64_t d = 0; d < f->head_dim; d++) t->done[h][d] = t->done[h][d] * down[h] + back[h][d];
        memcpy(t->done_top, t->top, sizeof t->top);
        clear(t->o, f->head_dim);
    }
    for (int64_t d = 0; v->rank && d < f->head_dim; d += MAX_TOKENS) {
        const uint8_t *basis = segment + v->b + 2 * d * v->rank;
        const int64_t count = lay_factor(basis, basis, f->head_dim - d, v->rank, room);
        add_lowered(t->low_v, count, v->rank, room, t->o[0] + d);
    }
}

/* Scores s [4][LINE] of tokens from `first` on become weights; what was gathered is scaled down */
static void soften(Tile *t, float (*s)[LINE], int64_t first, int64_t tokens, float down[16]) {
    V most[4] = {0};
    float top[LANES];
    for (int h = 0; h < t->rows; h++) {
        int64_t lo = t->lo[h] - first, hi = t->hi[h] - first;
        for (int64_t i = 0; i < tokens && i < lo; i++) s[h][i] = -__builtin_inff();
        for (int64_t i = hi < 0 ? 0 : hi; i < tokens; i++) s[h][i] = -__builtin_inff();
        most[h] = v_set(t->top[h]);
        for (int64_t i = 0; i < tokens; i += LANES) most[h] = v_max(most[h], v_load(s[h] + i));
    }
    v_store(top, v_fours(most, 0));
    for (int h = 0; h < TILE; h++) down[h] = t->top[h] - top[h];
    v_store(down, v_exp2(v_load(down)));
    for (int h = 0; h < t->rows; h++) {
        V sum = v_load(t->total[h]) * v_set(down[h]), from = v_set(top[h]);
        for (int64_t i = 0; i < tokens; i += LANES) {
            V p = v_exp2(v_load(s[h] + i) - from);
            v_store(s[h] + i, p);
            sum = sum + p;
        }
        v_store(t->total[h], sum);
        t->top[h] = top[h];
    }
}

/* Scores s [4][LINE], in units of log2, under the cap of a model that has one:
 * tanh |x| = (1 - e) / (1 + e), e = exp(-2 |x|) */
static void cap_scores(const Tile *t, float *s, int64_t tokens) {
    for (int64_t h = 0; t->cap > 0 && h < TILE; h++)
        for (int64_t i = 0; i < tokens; i += LANES) {
            V x = v_max(v_set(-1e30f), v_min(v_set(1e30f), v_load(s + h * LINE + i))); /* NaN stays */
            V size = v_max(v_abs(x), v_set(1e-30f));
            V e = v_exp2(size * v_set(-2 / t->cap)), top = v_set(t->cap * 1.44269504f);
            v_store(s + h * LINE + i, top * (1 - e) * x / ((1 + e) * size));
        }
}

/* Scores of the tokens of one page: out [4][LINE] */
static void score_page(Tile *t, const Format *f, const Strip *strip, Room *room, float *out) {
    const Side *k = f->k;
    const uint8_t *block = strip->blocks[0];
    const float *x = k->turn || f->order >= 0 ? t->turned[0] : t->q[0];
    if (f->raw != NO_TYPE || k->floating) {
        const int64_t type = k->floating ? FP8 : f->raw, at = k->floating ? k->codes : f->raw_k;
        BY_TYPE(type, multiply_numbers, block + at, strip->next[0] + at, f->tokens, f->head_dim, x,
                k->floating ? float8_scale(k, block) : 1.0f, out);
    } else if (k->by == BY_ROW) {
        contract_rows(k, strip, &t->k, room, out);
    } else {
        if (!k->shared) fold_columns(k, (int)f->bands, strip, x, room, &t->k);
        contract_columns(k, (int)f->bands, strip, &t->k, room->rows, (float(*)[LINE])out);
    }
    if (k->rank) {
        lay_factor(block + k->a, strip->next[0] + k->a, f->tokens, k->rank, room);
        add_lowered(t->low_q, f->tokens, k->rank, room, out);
    }
    if (k->slots) add_sparse(k, strip, t->q[0], room->sparse, out);
    cap_scores(t, out, f->tokens);
    for (int64_t i = 0; f->valid >= 0 && i < f->tokens; i++)
        for (int h = 0; h < TILE && !(block[f->valid + i / 8] >> (i % 8) & 1); h++)
            out[h * LINE + i] = -__builtin_inff();
}

/* Weighted sums of the values of a strip, weights in room->s: room->out, and low_v */
static void sum_values(Tile *t, const Format *f, const Strip *strip, const float *down, Room *room) {
    const Side *v = &f->v;
    float(*out)[LINE] = room->out;
    if (f->latent) {
        contract_latents(f->k, v, strip, v->shared ? t->segment : NULL, f->latent, room, out[0]);
    } else if (v->floating) {
        for (int i = 0; i < strip->count; i++) {
            const uint8_t *block = strip->blocks[i];
            multiply_numbers(FP8, block + v->codes, strip->next[i] + v->codes, f->head_dim, f->tokens,
                             room->s[0] + i * f->tokens, float8_scale(v, block),
                             (i ? room->part : out)[0]);
            for (int h = 0; h < TILE && i; h++)
                for (int64_t d = 0; d < f->head_dim; d++) out[h][d] += room->part[h][d];
        }
    } else {
        fold_columns(v, 1, strip, room->s[0], room, &room->v);
        contract_columns(v, 1, strip, &room->v, room->rows, out);
    }
    if (v->slots) add_sparse(v, strip, room->s[0], room->sparse, out[0]);
    for (int h = 0; h < TILE; h++)
        for (int64_t r = 0; r < v->rank; r++) t->low_v[h][r] *= down[h];
    for (int i = 0; i < strip->count && v->rank; i++) {
        lay_factor(strip->blocks[i] + v->a, strip->next[i] + v->a, f->tokens, v->rank, room);
        lower(room->s[0] + i * f->tokens, f->tokens, v->rank, room, t->low_v);
    }
}

INLINE int size_of(int type) { return type == FP32 ? 4 : type == FP8 ? 1 : 2; }

/* o [D] += p [tokens] times rows [tokens][D] of V that a query sees: `wide` vectors from column d on */
INLINE void add_columns(int type, Tile *t, const float *p, const uint8_t *rows, const uint8_t *next,
                        int64_t stride, int64_t first, int64_t tokens, int64_t d, int wide, int all) {
    V o[SUMS], y[SUMS];
    const int size = size_of(type);
    for (int i = 0; i < TILE * wide; i++) o[i] = v_load(t->o[i / wide] + d + i % wide * LANES);
    for (int64_t i = 0; i < tokens; i++) {
        const uint8_t *line = rows + i * stride + d * size;
#pragma GCC unroll 16
        for (int j = 0; j < wide; j += 64 / size / LANES)
            fetch_both(next + i * stride + (d + j * LANES) * size, line + (wide + j) * LANES * size);
#pragma GCC unroll 16
        for (int j = 0; j < wide; j++) y[j] = v_read(rows + i * stride, d + j * LANES, type);
#pragma GCC unroll 4
        for (int h = 0; h < TILE; h++) { /* what a query does not see may be no number */
            if (!all && (first + i < t->lo[h] || first + i >= t->hi[h])) continue;
#pragma GCC unroll 16
            for (int j = 0; j < wide; j++)
                o[h * wide + j] = v_fma(v_set(p[h * LINE + i]), y[j], o[h * wide + j]);
        }
    }
    for (int i = 0; i < TILE * wide; i++) v_store(t->o[i / wide] + d + i % wide * LANES, o[i]);
}

INLINE void add_values(int type, Tile *t, const float *p, const uint8_t *rows, const uint8_t *next,
                       int64_t row, int64_t first, int64_t tokens, int64_t dim) {
    enum { WIDE = TILE == 1 ? 4 : 2 };
    int64_t stride = row * size_of(type), all = 1;
    for (int h = 0; h < t->rows; h++) all &= t->lo[h] <= first && first + tokens <= t->hi[h];
    int64_t d = 0;
    for (; all && d + WIDE * LANES <= dim; d += WIDE * LANES)
        add_columns(type, t, p, rows, next, stride, first, tokens, d, WIDE, 1);
    for (; d < dim; d += LANES) add_columns(type, t, p, rows, next, stride, first, tokens, d, 1, all);
}

/* o += p times the values of a page that are read as they lie, p in room->s from `at` on */
static void add_page(Tile *t, const Format *f, const uint8_t *block, const uint8_t *next, int64_t first,
                     int64_t at, Room *room) {
    const int64_t tokens = f->tokens, dim = f->value_dim;
    const int type = f->raw != NO_TYPE ? (int)f->raw : FP8;
    const int64_t rows = type == FP8 ? f->k->codes : f->raw_v;
    for (int h = 0; h < TILE && type == FP8; h++)
        for (int64_t i = 0; i < tokens; i++) room->s[h][at + i] *= float8_scale(f->k, block);
    BY_TYPE(type, add_values, t, room->s[0] + at, block + rows, next + rows, f->head_dim, first + at, tokens, dim);
}

/* What a tile sees of the pages of a strip, whose first token is `first` */
static void attend_strip(Tile *t, const Format *f, const Strip *s, int64_t first, Room *room) {
    const int64_t tokens = f->tokens;
    const int lies = f->raw != NO_TYPE || (f->latent && f->k->floating); /* as add_page reads it */
    float down[16] = {0};
    for (int i = 0; i < s->count; i++)
        score_page(t, f, &(Strip){{s->blocks[i]}, {s->soon[i]}, {s->next[i]}, 1}, room, room->s[0] + i * tokens);
    soften(t, room->s, first, s->count * tokens, down);
    if (!lies) sum_values(t, f, s, down, room);
    for (int h = 0; h < TILE; h++)
        for (int64_t d = 0; d < f->value_dim; d += LANES) {
            const V more = lies ? v_set(0) : v_load(room->out[h] + d);
            v_store(t->o[h] + d, v_fma(v_load(t->o[h] + d), v_set(down[h]), more));
        }
    for (int64_t i = 0; lies && i < s->count; i++)
        add_page(t, f, s->blocks[i], s->next[i], first, i * tokens, room);
}

static const uint8_t *block_of(const Table *x, int64_t page, int64_t base, int64_t bytes, int64_t block) {
    return x->arena + page * UNIT + base + block * bytes;
}

/* Pages of a strip from column p on, before `end`: a multiple of STRIP ends it, and so does another
 * segment, so that strips do not depend on who looks; then: what is read after them, or NULL */
static Strip strip_of(const Table *x, int64_t b, int64_t block, int64_t p, int64_t end, const Strip *then) {
    const Format *f = x->format;
    const int32_t *pages = x->pages + b * x->num_pages, *owner = x->owner + b * x->num_pages;
    int64_t most = PART / f->tokens < STRIP ? PART / f->tokens : STRIP;
    Strip s = {.count = 0};
    for (int64_t i = p; i < end && (i == p || i % most); i++) {
        if (x->segments && owner[i] != owner[p]) break;
        const uint8_t *here = block_of(x, pages[i], x->base, f->block_bytes, block), *next = here;
        if (i + most < end) next = block_of(x, pages[i + most], x->base, f->block_bytes, block);
        else if (then && s.count < then->count) next = then->blocks[s.count];
        s.blocks[s.count] = here, s.next[s.count++] = next;
    }
    for (int i = 0; i < s.count; i++) s.soon[i] = i + 1 < s.count ? s.blocks[i + 1] : s.next[0];
    return s;
}

/* The first strip that a unit sees of a table; behind the last table, what comes next on its thread sees */
static Strip first_strip(const Attention *a, int64_t unit, const Table *x) {
    if (x == a->tables + a->num_tables) x = a->tables, unit += a->ahead;
    const int64_t at = unit / ((a->m * a->width + ROWS - 1) / ROWS), b = at / a->heads;
    const int64_t p = b < a->batch ? (uint32_t)x->lo[b * a->m] / x->format->tokens : x->num_pages;
    return strip_of(x, b, a->layer * a->heads + at % a->heads, p, x->num_pages, NULL);
}

static int turns_output(const Format *f) { return f->v.turn || f->signs >= 0; }

/* Before tiles see a table: windows of their queries, of which the first one is `query` */
static void enter_table(const Table *x, const Attention *a, int64_t b, int64_t query, Tile *t) {
    const Format *f = x->format;
    t->segment = NULL, t->first = INT32_MAX, t->end = 0;
    for (int h = 0; h < TILE; h++) {
        const int64_t at = b * a->m + (query + h) / a->width;
        t->lo[h] = h < t->rows ? x->lo[at] : 0;
        t->hi[h] = h < t->rows ? x->hi[at] : 0;
        if (t->hi[h] <= t->lo[h]) continue;
        if (t->lo[h] < t->first) t->first = t->lo[h];
        if (t->hi[h] > t->end) t->end = t->hi[h];
    }
    if (turns_output(f)) {
        memcpy(t->done, t->o, sizeof t->o), memcpy(t->done_top, t->top, sizeof t->top);
        clear(t->o, f->head_dim);
    }
    if (t->end && f->raw == NO_TYPE && f->k->by == BY_ROW && !f->k->turn) fold_rows(f->k, t->q, &t->k);
}

/* What the queries of some tiles see of one table; block: of its pages, those of one head; then: see above */
static void attend_table(const Table *x, Tile *tiles, int count, int64_t b, int64_t block, const Strip *then,
                         Room *room) {
    const Format *f = x->format;
    const int64_t tokens = f->tokens;
    int64_t first = INT32_MAX, end = 0;
    for (const Tile *t = tiles; t < tiles + count; t++) {
        if (t->first < first) first = t->first;
        if (t->end > end) end = t->end;
    }
    first /= tokens, end = (end + tokens - 1) / tokens;
    Strip strip;
    for (int64_t p = first; p < end; p += strip.count) {
        const uint8_t *segment = NULL;
        strip = strip_of(x, b, block, p, end, then);
        if (x->segments) {
            const int64_t id = x->segments[b * x->num_segments + x->owner[b * x->num_pages + p]];
            segment = block_of(x, id, x->segment_base, f->segment_bytes, block);
        }
        for (Tile *t = tiles; t < tiles + count; t++) {
            if (t->first >= (p + strip.count) * tokens || t->end <= p * tokens) continue;
            if (t->segment != segment) {
                if (t->segment) leave_segment(t, f, 0, room);
                enter_segment(t, f, segment, room);
            }
            attend_strip(t, f, &strip, p * tokens, room);
        }
    }
    for (Tile *t = tiles; t < tiles + count; t++) {
        if (t->segment) leave_segment(t, f, 1, room);
        if (turns_output(f)) memcpy(t->o, t->done, sizeof t->o); /* o is empty */
    }
}

/* Sixteen queries of one KV head of one sequence */
static void attend_unit(const Attention *a, int64_t unit) {
    Tile tiles[TILE == 1 ? 1 : ROWS / TILE];
    Room room;
    const int64_t n = a->m * a->width, chunks = (n + ROWS - 1) / ROWS, dim = a->head_dim;
    const int64_t first = unit % chunks * ROWS, head = unit / chunks % a->heads;
    const int64_t b = unit / chunks / a->heads, rows = n - first < ROWS ? n - first : ROWS;
    const int count = (int)(rows + TILE - 1) / TILE;
    const int64_t value_dim = a->tables->format->value_dim;
    for (int i = 0; i < count; i++) {
        Tile *t = tiles + i;
        clear(t->o, dim), clear(t->q, dim);
        memset(t->total, 0, sizeof t->total);
        t->cap = a->cap;
        t->rows = rows - i * TILE < TILE ? (int)(rows - i * TILE) : TILE;
        for (int h = 0; h < TILE; h++) t->top[h] = -1e30f;
        for (int h = 0; h < t->rows; h++) {
            const int64_t n = first + i * TILE + h, row = b * a->m + n / a->width;
            const int64_t at = row * a->q_row + (head * a->width + n % a->width) * a->q_head;
            for (int64_t d = 0; d < dim; d += LANES)
                v_store(t->q[h] + d, v_read(a->q, at + d, (int)a->type) * v_set(a->scale * 1.44269504f));
        }
    }
    for (const Table *x = a->tables; x < a->tables + a->num_tables; x++) {
        for (int i = 0; i < count; i++) enter_table(x, a, b, first + i * TILE, tiles + i);
        const Strip then = first_strip(a, unit, x + 1);
        attend_table(x, tiles, count, b, a->layer * a->heads + head, &then, &room);
    }
    for (int64_t i = 0; i < rows; i++) {
        const Tile *t = tiles + i / TILE;
        const int h = i % TILE;
        const int64_t row = b * a->m + (first + i) / a->width, which = (first + i) % a->width;
        const int64_t at = (row * a->heads + head) * a->width + which;
        const float total = v_sum(v_load(t->total[h])), by = total > 0 ? 1 / total : 0;
        for (int64_t d = 0; d < value_dim; d += LANES)
            v_write(a->o, at * value_dim + d, v_load(t->o[h] + d) * v_set(by), (int)a->type);
        if (a->lse) a->lse[at] = total ? (t->top[h] + __builtin_log2f(total)) * 0.693147181f : -__builtin_inff();
    }
}
