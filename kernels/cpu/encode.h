/* Encoders: the bytes of reference/encode.py and quantize.py, bit for bit. Every step is
 * one rounded operation in the order of the reference: torch's addcmul and Triton's encoder round
 * x * inverse + shift once, so this does. A side is a matrix whose groups run down its columns. */

typedef struct { /* of the numbers in each column of a group */
    float low[MAX_DIM], high[MAX_DIM];
} Range;
#define LARGEST 65504.0f
INLINE V v_finite(V x) { /* 0 where it is no number */
    return v_max(v_min((V)((W)x & (x == x)), v_set(LARGEST)), v_set(-LARGEST));
}

static void read_page(float *to, const uint8_t *from, int type, int64_t stride, int64_t tokens,
                      int64_t dim) {
    int64_t size = type == FP32 ? 4 : 2;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += LANES)
            v_store(to + t * dim + d, v_finite(v_read(from + size * t * stride, d, type)));
}

/* x [rows][columns] -> y [columns][rows] */
static void transpose(const float *x, int64_t rows, int64_t columns, float *y) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            V a[LANES];
            for (int i = 0; i < LANES; i++) a[i] = v_load(x + (r + i) * columns + c);
            v_transpose(a);
            for (int i = 0; i < LANES; i++) v_store(y + (c + i) * rows + r, a[i]);
        }
}

/* more: than the range has seen */
static void see_rows(Range *range, const float *x, int64_t rows, int64_t columns, int more) {
    for (int64_t c = 0; c < columns; c += LANES) {
        V low = more ? v_load(range->low + c) : v_set(LARGEST);
        V high = more ? v_load(range->high + c) : v_set(-LARGEST);
        for (int64_t r = 0; r < rows; r++) {
            V y = v_load(x + r * columns + c);
            low = v_min(low, y);
            high = v_max(high, y);
        }
        v_store(range->low + c, low);
        v_store(range->high + c, high);
    }
}

/* Scales and zeros of a group, whose first ones are `at` bytes behind those of a block */
static void choose_scales(const Side *s, const Range *range, int64_t columns, uint8_t *block, int64_t at) {
    const V least = v_set(0x1p-24f);
    for (int64_t c = 0; c < columns; c += LANES, at += 2 * LANES) {
        V low = v_load(range->low + c), high = v_load(range->high + c);
        V scale, largest = v_max(v_abs(low), v_abs(high));
        if (s->zero < 0) scale = largest / v_set((float)((1 << (s->bits - 1)) - 1));
        else scale = v_max((high - low) / v_set((float)((1 << s->bits) - 1)), largest / v_set(1024.0f));
        v_store_half(block + s->scale + at, v_max(scale, least));
        if (s->zero < 0) continue;
        const V step = v_half(block + s->scale + at);
        v_store_half(block + s->zero + at, low / step + v_set(0)); /* -0 becomes 0 */
    }
}

/* Codes of a group in place: clamp(round(x / scale - zero)) */
static void make_codes(const Side *s, float *x, int64_t rows, int64_t columns, const uint8_t *block,
                       int64_t at) {
    const int symmetric = s->zero < 0;
    const float limit = (float)((1 << (s->bits - 1)) - 1);
    const V low = v_set(symmetric ? -limit : 0), after = v_set(symmetric ? limit + 1 : 0);
    const V high = v_set(symmetric ? limit : (float)((1 << s->bits) - 1));
    for (int64_t c = 0; c < columns; c += LANES, at += 2 * LANES) {
        const V inverse = v_set(1.0f) / v_half(block + s->scale + at);
        const V shift = symmetric ? v_set(0) : v_set(0) - v_half(block + s->zero + at);
        for (int64_t r = 0; r < rows; r++) {
            float *from = x + r * columns + c;
            V y = v_round(v_fused(v_load(from), inverse, shift));
            v_store(from, v_min(v_max(y, low), high) + after);
        }
    }
}

/* Codes of a group whose range is clipped, their scales stretched so that <x', x> = <x, x> about the
 * mean: quantize.py has every step */
static void fit(const Side *s, const Range *range, float *x, int64_t columns, uint8_t *block, int64_t at) {
    const V levels = v_set((float)((1 << s->bits) - 1)), share = v_set(s->bits == 2 ? 0.66f : 1.0f);
    const V n = v_set((float)s->group), half = v_set(0.5f), least = v_set(0x1p-24f);
    for (int64_t c = 0; c < columns; c += LANES, at += 2 * LANES) {
        const V low = v_load(range->low + c), high = v_load(range->high + c), width = (high - low) * share;
        V step = v_max(width / levels, v_max(v_abs(low), v_abs(high)) / v_set(1024.0f));
        step = v_max(step, least);
        const V start = (low + high) * half - width * half, inverse = v_set(1.0f) / step;
        V sum = v_set(0), codes = sum, squares = sum, along = sum;
        for (int64_t r = 0; r < s->group; r++) {
            float *from = x + r * columns + c;
            const V u = (v_load(from) - start) * inverse;
            const V code = v_min(v_max(v_round(u), v_set(0)), levels);
            v_store(from, code);
            sum = sum + u, codes = codes + code;
            squares = squares + u * u, along = along + u * code;
        }
        const V mean = sum / n, middle = codes / n;
        const V whole = squares - sum * mean, part = along - sum * middle;
        const V stretch = v_min(v_max(whole / part, half), v_set(2.0f));
        const W stretched = part > v_set(0);
        const V by = (V)(((W)stretch & stretched) | ((W)v_set(1.0f) & ~stretched));
        v_store_half(block + s->scale + at, v_max(step * by, least));
        v_store_half(block + s->zero + at, (start + step * mean) / v_half(block + s->scale + at) - middle);
    }
}

/* The means of columns, which are all that a side without bits has */
static void store_means(const float *x, int64_t rows, int64_t columns, uint8_t *to) {
    for (int64_t c = 0; c < columns; c += LANES) {
        V sum = v_load(x + c);
        for (int64_t r = 1; r < rows; r++) sum = sum + v_load(x + r * columns + c);
        v_store_half(to + 2 * c, v_finite(sum / v_set((float)rows)));
    }
}

/* Codes [rows][columns] as words */
static void pack(const Side *s, const float *codes, uint8_t *to) {
    const int64_t halves = halves_of(s), words = s->columns / halves;
    const int planes = s->bits == 8 ? 2 : 4;
    const int64_t plane = s->rows / planes;
    for (int64_t r = 0; r < plane; r++)
        for (int64_t c = 0; c < words; c += LANES) {
            int16_t found[LANES];
            V w = v_set(0);
            for (int f = 0; f < planes; f++)
                for (int64_t half = 0; half < halves; half++) {
                    V y = v_load(codes + (f * plane + r) * s->columns + half * words + c);
                    w = w + y * v_set((float)(1 << (f * s->bits + 8 * half)));
                }
            v_store_int16(found, __builtin_convertvector(w, W));
            memcpy(to + 2 * (r * words + c), found, 2 * (words - c < LANES ? words - c : LANES));
        }
}

/* The codes of x [rows][columns], where groups run down: in place, scales to their planes */
static void quantise(const Side *s, float *x, int64_t rows, int64_t columns, uint8_t *block) {
    Range range;
    for (int64_t i = 0; i < rows / s->group; i++, x += s->group * columns) {
        const int64_t at = 2 * i * columns;
        if (!s->bits) {
            store_means(x, s->group, columns, block + s->scale + at);
            continue;
        }
        see_rows(&range, x, s->group, columns, 0);
        if (s->fitted) {
            fit(s, &range, x, columns, block, at);
        } else {
            choose_scales(s, &range, columns, block, at);
            make_codes(s, x, s->group, columns, block, at);
        }
    }
}

/* One scale for all numbers, and e4m3 of x over it, to nearest, ties to even */
static void encode_float8(const Side *s, float *x, uint8_t *block) {
    V largest = v_set(0);
    const int64_t count = s->rows * s->columns;
    for (int64_t i = 0; i < count; i += LANES) largest = v_max(v_abs(v_load(x + i)), largest);
    float scale = v_fours((V[4]){largest, largest, largest, largest}, 0)[0] / 448.0f;
    if (scale < 0x1p-100f) scale = 0x1p-100f;
    memcpy(block + s->scale, &scale, 4);
    for (int64_t i = 0; i < count; i += LANES) {
        V y = v_load(x + i) / v_set(scale);
        y = v_max(v_min(y, v_set(448.0f)), v_set(-448.0f));
        const W u = (W)v_abs(y), small = u < 0x3c800000;
        const W tiny = (W)((V)u + 0x1p14f); /* below 2**-6 this rounds to multiples of 2**-9 */
        const W usual = (u - 0x3bf80001 + (u >> 20 & 1)) >> 20;
        const W code = (((tiny & small) | (usual & ~small)) & 0x7f) | ((W)y >> 24 & 0x80);
        const Byte bytes = __builtin_convertvector(code, Byte);
        memcpy(block + s->codes + i, &bytes, sizeof bytes);
    }
}

/* A side of one page: x [rows][columns] and y are overwritten. shared: the segment that has its scales */
static void encode_side(const Side *s, float *x, float *y, uint8_t *block, const uint8_t *shared) {
    if (s->floating) {
        encode_float8(s, x, block);
        return;
    }
    if (shared) {
        make_codes(s, x, s->rows, s->columns, shared, 0);
    } else if (s->by == BY_COLUMN) {
        quantise(s, x, s->rows, s->columns, block);
    } else { /* groups of a row */
        transpose(x, s->rows, s->columns, y);
        quantise(s, y, s->columns, s->rows, block);
        transpose(y, s->columns, s->rows, x);
    }
    if (s->bits) pack(s, x, block + s->codes);
}

/* K [tokens][head dim] in the order of a segment, band after band: y [tokens][columns] of each. The order
 * may come from a peer, so only the low bits of it are read: head_dim is a power of two */
static void encode_bands(const Format *f, const float *x, float *y, const uint8_t *segment, uint8_t *block) {
    int16_t order[MAX_DIM];
    memcpy(order, segment + f->order, 2 * f->head_dim);
    for (int64_t c = 0; c < f->head_dim; c++) order[c] &= (int16_t)(f->head_dim - 1);
    const int16_t *from = order;
    for (const Side *s = f->k; s < f->k + f->bands; from += s->columns, s++) {
        for (int64_t t = 0; t < f->tokens; t++)
            for (int64_t c = 0; c < s->columns; c++) y[t * s->columns + c] = x[t * f->head_dim + from[c]];
        encode_side(s, y, NULL, block, NULL);
    }
}

/* V, lying [head dim][tokens], turned: H (s * v) / 8 by butterflies */
static void turn_values(const Format *f, float *y, const uint8_t *segment) {
    const int64_t n = f->tokens;
    for (int64_t d = 0; d < f->head_dim; d++) {
        const V sign = v_set(segment[f->signs + d / 8] >> d % 8 & 1 ? -1.0f : 1.0f);
        for (int64_t t = d * n; t < (d + 1) * n; t += LANES) v_store(y + t, v_load(y + t) * sign);
    }
    for (int64_t half = 1; half < TURN; half *= 2)
        for (int64_t d = 0; d < f->head_dim; d++)
            for (int64_t t = d * n; t < (d + 1) * n && !(d & half); t += LANES) {
                const V a = v_load(y + t), b = v_load(y + t + half * n);
                v_store(y + t, a + b);
                v_store(y + t + half * n, a - b);
            }
    for (int64_t t = 0; t < f->head_dim * n; t += LANES)
        v_store(y + t, v_finite(v_load(y + t) * v_set(0.125f)));
}

/* The pages of one head in one segment; where pages share nothing, one page */
static void encode_unit(const Encoding *e, int64_t unit) {
    const Format *f = e->format;
    const int64_t span = f->k->shared ? e->segment_tokens : f->tokens, head = unit % e->heads;
    const int64_t first = unit / e->heads * span, size = e->type == FP32 ? 4 : 2, dim = f->head_dim;
    const int64_t end = first + span < e->tokens ? first + span : e->tokens;
    const uint8_t *k = e->k + size * head * e->k_head, *v = e->v + size * head * e->v_head;
    ALIGNED float x[MAX_TOKENS * MAX_DIM + 16], y[MAX_TOKENS * MAX_DIM + 16];
    uint8_t *segment = e->segments + (first / e->segment_tokens * e->heads + head) * f->segment_bytes;
    if (f->k->shared) {
        Range range = {{0}, {0}}; /* gcc does not know that there is a page */
        for (int64_t t = first; t < end; t += f->tokens) {
            read_page(x, k + size * t * e->k_token, (int)e->type, e->k_token, f->tokens, dim);
            see_rows(&range, x, f->tokens, dim, t > first);
        }
        choose_scales(f->k, &range, dim, segment, 0);
    }
    for (int64_t t = first; t < end; t += f->tokens) {
        const int64_t page = e->pages ? e->pages[t / f->tokens] : t / f->tokens;
        uint8_t *block = e->blocks + page * e->unit + e->base + head * f->block_bytes;
        memset(block, 0, f->block_bytes); /* planes may leave gaps */
        read_page(x, k + size * t * e->k_token, (int)e->type, e->k_token, f->tokens, dim);
        if (f->order >= 0) encode_bands(f, x, y, segment, block);
        else encode_side(f->k, x, y, block, f->k->shared ? segment : NULL);
        if (f->valid >= 0) memset(block + f->valid, 255, f->tokens / 8);
        if (f->latent) continue; /* V is in K */
        read_page(y, v + size * t * e->v_token, (int)e->type, e->v_token, f->tokens, dim);
        transpose(y, f->tokens, dim, x);
        if (f->signs >= 0) turn_values(f, x, segment);
        encode_side(&f->v, x, y, block, NULL);
    }
}

/* A new token of a head, in a raw page; what its dtype cannot hold saturates */
static void append_unit(const Append *x, int64_t unit) {
    const Format *f = x->format;
    const int64_t row = unit / x->heads, head = unit % x->heads, size = f->raw == FP32 ? 4 : 2;
    const V most = v_set(f->raw == FP16 ? LARGEST : f->raw == BF16 ? 0x1.fep127f : 0x1.fffffep127f);
    uint8_t *to = x->arena + (int64_t)x->pages[row] * UNIT + x->base;
    to += (x->layer * x->heads + head) * f->block_bytes + x->slots[row] * size * f->head_dim;
    for (int64_t d = 0; x->pages[row] >= 0 && d < f->head_dim; d += LANES) {
        const V k = v_read(x->k, row * x->k_row + head * x->k_head + d, (int)x->type);
        v_write(to + f->raw_k, d, v_min(most, v_max(-most, k)), (int)f->raw);
        if (f->latent) continue; /* V is in K */
        const V v = v_read(x->v, row * x->v_row + head * x->v_head + d, (int)x->type);
        v_write(to + f->raw_v, d, v_min(most, v_max(-most, v)), (int)f->raw);
    }
}

/* Squares of a KV head's queries, 16 tokens, in whole multiples of 2**-20: so sums are exact */
static void sum_squares(const Squares *s, int64_t unit) {
    typedef double Sums __attribute__((vector_size(8 * LANES)));
    const int64_t start = unit / s->heads * SLOTS - s->begun, size = s->type == FP32 ? 4 : 2;
    const int64_t first = start < 0 ? 0 : start, end = start + SLOTS < s->tokens ? start + SLOTS : s->tokens;
    const uint8_t *q = s->q + size * (unit % s->heads * s->width * s->q_head);
    for (int64_t d = 0; d < s->head_dim; d += LANES) {
        Sums sums = {0};
        for (int64_t h = 0; h < s->width; h++)
            for (int64_t t = first; t < end; t++) {
                V x = v_read(q + size * (h * s->q_head + t * s->q_token), d, (int)s->type);
                x = x * x * v_set(0x1p20f);
                const W small = x < v_set(0x1p23f); /* above, all are whole */
                const V whole = (x + v_set(0x1p23f)) - v_set(0x1p23f);
                sums += __builtin_convertvector((V)(((W)whole & small) | ((W)x & ~small)), Sums);
            }
        sums *= 0x1p-20;
        memcpy(s->sums + unit * s->head_dim + d, &sums, sizeof sums);
    }
}
