/* What a layer computes between its matrix products, row by row: in fp32, and rounded where the modules
 * of transformers round, so that logits stay as near to theirs as their own type allows. A unit is ROWS
 * rows. */
INLINE V v_as(V x, int type) { /* as a number of a type, to nearest; ties to even */
    const W u = (W)x;
    if (type == BF16) return (V)((u + 0x7fff + (u >> 16 & 1)) & (int32_t)0xffff0000);
    if (type != FP16) return x;
    Short h;
    v_store_half(&h, x);
    return v_half(&h);
}


INLINE int64_t last_row(int64_t unit, int64_t rows) { return (unit + 1) * ROWS < rows ? (unit + 1) * ROWS : rows; }

INLINE void norm_rows(int type, const Norm *n, int64_t unit) {
    const int64_t size = size_of(type), columns = n->columns;
    for (int64_t i = unit * ROWS; i < last_row(unit, n->rows); i++) {
        const uint8_t *x = n->x + i * n->x_row * size;
        V squares = {0};
        if (n->more) {
            const uint8_t *more = n->more + i * n->more_row * size;
            uint8_t *sum = n->sum + i * columns * size;
            for (int64_t d = 0; d < columns; d += LANES)
                v_write(sum, d, v_fma(v_set(n->factor), v_read(more, d, type), v_read(x, d, type)), type);
            x = sum; /* as it was rounded */
        }
        for (int64_t d = 0; d < columns; d += LANES) {
            const V y = v_read(x, d, type);
            squares = v_fma(y, y, squares);
        }
        const V by = v_set(1 / __builtin_sqrtf(v_sum(squares) / (float)columns + n->epsilon));
        uint8_t *out = n->out + i * columns * size;
        for (int64_t d = 0; d < columns; d += LANES)
            v_write(out, d, v_as(v_read(x, d, type) * by, type) * v_read(n->weight, d, type), type);
    }
}

INLINE void rotate_rows(int type, const Rotation *r, int64_t unit) {
    const int64_t size = size_of(type), half = r->head_dim / 2;
    for (int64_t i = unit * ROWS; i < last_row(unit, r->rows); i++) {
        const uint8_t *cosines = r->cosines + i * r->head_dim * size, *sines = r->sines + i * r->head_dim * size;
        for (int64_t h = 0; h < r->heads; h++) {
            uint8_t *x = r->x + (i * r->x_row + h * r->head_dim) * size;
            for (int64_t d = 0; d < half; d += LANES) {
                const V low = v_read(x, d, type), high = v_read(x, half + d, type);
                const V first = v_as(low * v_read(cosines, d, type), type);
                const V second = v_as(high * v_read(cosines, half + d, type), type);
                v_write(x, d, first + v_as(high * v_read(sines, d, type), type), type);
                v_write(x, half + d, second + v_as(low * v_read(sines, half + d, type), type), type);
            }
        }
    }
}

INLINE void gate_rows(int type, const Gate *g, int64_t unit) {
    const int64_t size = size_of(type), columns = g->columns;
    for (int64_t i = unit * ROWS; i < last_row(unit, g->rows); i++) {
        const uint8_t *x = g->x + i * g->x_row * size;
        for (int64_t d = 0; d < columns; d += LANES) {
            const V y = v_read(x, d, type), e = v_exp2(v_abs(y) * v_set(-1.44269504f));
            const W below = y < 0;
            const V part = (V)(((W)e & below) | ((W)v_set(1) & ~below)); /* of 1 + e: the logistic function */
            v_write(g->out + i * columns * size, d, v_as(y * part / (1 + e), type) * v_read(x, columns + d, type), type);
        }
    }
}

static void norm_unit(const Norm *n, int64_t unit) { BY_TYPE(n->type, norm_rows, n, unit); }
static void rotate_unit(const Rotation *r, int64_t unit) { BY_TYPE(r->type, rotate_rows, r, unit); }
static void gate_unit(const Gate *g, int64_t unit) { BY_TYPE(g->type, gate_rows, g, unit); }
