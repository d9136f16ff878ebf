/* What pages add to their codes, by the algebra of reference/codes.py: sparse slots and low rank; and
 * the turns of V, whose sums are turned back once. */
#include "contract.h"

/* Sparse slots of some pages: delta times the vector x [4][LINE], added at their rows to out [4][LINE] */
APART void add_sparse(const Side *s, const Strip *strip, const float *x, Queries *rows, float *out) {
    memset(rows, 0, sizeof *rows * s->rows);
    for (int page = 0; page < strip->count; page++, x += s->columns) {
        const uint8_t *block = strip->blocks[page], *index = block + s->index;
        float delta[16 * MAX_SLOTS], *d = delta;
        for (int64_t c = 0; c < s->columns; c++) {
            Queries by;
            if (c % 16 == 0) read_halves(d = delta, block + s->delta + 2 * c * s->slots, 16 * s->slots);
            for (int h = 0; h < TILE; h++) by[h] = x[h * LINE + c];
            for (int64_t i = 0; i < s->slots; i++) rows[*index++] += by * *d++;
        }
    }
    for (int64_t r = 0; r < s->rows; r += LANES) {
        V a[4];
        memcpy(a, rows + r, LANES * sizeof *rows);
        if (TILE == 4) v_transpose4(a);
        for (int h = 0; h < TILE; h++)
            v_store(out + h * LINE + r, v_load(out + h * LINE + r) + (TILE == 4 ? ACROSS(a[h]) : a[h]));
    }
}

/* Rows of a factor [count][rank], lying: [rank][count], and zeros up to a multiple of 4 ranks; at most
 * MAX_TOKENS of them: how many */
APART int64_t lay_factor(const uint8_t *from, const uint8_t *next, int64_t count, int64_t rank, Room *room) {
    if (count > MAX_TOKENS) count = MAX_TOKENS;
    for (int64_t t = 0; rank == 4 && t < count; t += LANES, from += 8 * LANES, next += 8 * LANES) {
        V a[4];
        fetch(next), fetch(next + 4 * LANES);
        for (int i = 0; i < 4; i++) a[i] = v_half(from + 2 * i * LANES);
        v_transpose4(a);
        for (int i = 0; i < 4; i++) v_store(room->lowered[i] + t, ACROSS(a[i]));
    }
    if (rank == 4) return count;
    const float *flat = room->part[0];
    read_halves(room->part[0], from, count * rank);
    for (int64_t i = 0; i < (rank + 3) / 4 * 4; i++)
        for (int64_t t = 0; t < count; t++) room->lowered[i][t] = i < rank ? flat[t * rank + i] : 0;
    return count;
}

/* low += x [4][LINE] times a factor that lies there */
APART void lower(const float *x, int64_t count, int64_t rank, const Room *room, float (*low)[MAX_RANK]) {
    for (int64_t r = 0; r < rank; r += 4) {
        V a[16];
        float sums[16];
        for (int i = 0; i < 16; i++) a[i] = v_set(0);
        for (int64_t i = 0; i < count; i += LANES)
#pragma GCC unroll 16
            for (int j = 0; j < 4 * TILE; j++)
                a[j] = v_fma(v_load(x + j / 4 * LINE + i), v_load(room->lowered[r + j % 4] + i), a[j]);
        for (int i = 0; i < 4 * TILE; i += LANES) v_store(sums + i, v_sums(a + i));
        for (int j = 0; j < 4 * TILE; j++) low[j / 4][r + j % 4] += sums[j];
    }
}

/* y [4][LINE] += the factor that lies there times low */
APART void add_lowered(float (*low)[MAX_RANK], int64_t count, int64_t rank, const Room *room, float *y) {
    for (int64_t r = 0; r < rank; r += 4)
        for (int64_t i = 0; i < count; i += LANES)
            for (int h = 0; h < TILE; h++) {
                V sum = v_load(y + h * LINE + i);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    sum = v_fma(v_set(low[h][r + j]), v_load(room->lowered[r + j] + i), sum);
                v_store(y + h * LINE + i, sum);
            }
}

/* x T_S^T, block by block of channels, or back: y [4][LINE] */
static void turn(const Side *s, const uint8_t *segment, const float *x, float *y, int64_t dim, int back) {
    float row[MAX_DIM];
    for (int64_t i = 0; i < dim * TILE; i++) y[i / dim * LINE + i % dim] = 0;
    for (int64_t j = 0; j < s->turn; j++) { /* a row of the matrix at a time */
        read_halves(row, segment + s->matrix + 2 * j * s->turn, s->turn);
        for (int64_t i = 0; i < s->turn; i++)
            for (int64_t at = 0; at < dim * TILE; at += s->turn) {
                const int64_t b = at / dim * LINE + at % dim;
                y[b + (back ? i : j)] += x[b + (back ? j : i)] * row[i];
            }
    }
}

/* x [4][LINE] of a turned V, as y was before: H x / 8 by butterflies, times the signs */
static void turn_back(const Format *f, const uint8_t *segment, float (*x)[LINE], float (*y)[LINE]) {
    const uint8_t *signs = segment + f->signs;
    for (int h = 0; h < TILE; h++) {
        for (int64_t half = 1; half < TURN; half *= 2)
            for (int64_t d = 0; d < f->head_dim; d += 2 * half)
                for (int64_t i = d; i < d + half; i++) {
                    const float a = x[h][i], b = x[h][i + half];
                    x[h][i] = a + b, x[h][i + half] = a - b;
                }
        for (int64_t d = 0; d < f->head_dim; d++)
            y[h][d] = x[h][d] * (signs[d / 8] >> d % 8 & 1 ? -0.125f : 0.125f);
    }
}
