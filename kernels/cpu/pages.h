/* What the C of a CPU knows of pages: the numbers of formats.py, as library.py
 * fills them in. Offsets are bytes from the start of a block; -1 says that a plane is not there. */
#pragma once
#include <stdint.h>
#include <string.h>

#ifndef TILE
#define TILE 4 /* queries that are computed together: 4, or 1 */
#endif
enum {
    UNIT = 128,         /* bytes of the arena that a page id counts */
    ROWS = 16,          /* queries of a unit of work: its pages stay in a cache for all of them */
    MAX_DIM = 576,      /* head dims; library.py sends larger ones to the reference */
    LINE = MAX_DIM + 16, /* floats from one query to the next: no two at the same place of a cache */
    MAX_TOKENS = 128,   /* of a page */
    STRIP = 4,          /* pages whose softmax is taken together: at most PART tokens */
    MAX_RANK = 16,
    MAX_BANDS = 3,
    MAX_SLOTS = 64,
    SLOTS = 16,         /* of a raw page, and tokens whose squares are added up */
    TURN = 64,          /* channels of V that are mixed */
    ZEROS = 4096,       /* int16 numbers of a vector that is contracted, all groups; then zeros */
    OPERANDS = ZEROS + 320, /* from one query to the next */
    MAX_GROUPS = 64,
    PART = 256          /* columns whose sums of codes fit 32 bits: 256 * 255 * 32767 < 2**31 */
};
enum { BY_COLUMN, BY_ROW, BY_BLOCK };
enum { FP16, BF16, FP32, FP8, NO_TYPE };

typedef struct {
    int64_t rows, columns, bits, codes;
    int64_t by, group, scale, zero, center, shared;
    int64_t rank, a, b;
    int64_t slots, index, delta;
    int64_t turn, matrix;
    int64_t floating, fitted;
} Side;

typedef struct {
    int64_t tokens, head_dim, block_bytes, segment_bytes, valid;
    int64_t raw, raw_k, raw_v; /* raw is NO_TYPE where pages hold codes */
    int64_t order, signs, bands; /* of K's columns: the first one is k[0] */
    int64_t latent, value_dim;   /* latent: V is so many channels of K, and v is K lying; or 0 */
    Side v, k[MAX_BANDS];
} Format;

typedef struct { /* one page table of every sequence, as a PageTable */
    const Format *format;
    const uint8_t *arena;
    const int32_t *pages, *lo, *hi, *segments, *owner;
    int64_t num_pages, num_segments, base, segment_base;
} Table;

typedef struct { /* queries [batch][m][heads * width][D]; o and lse, which may be NULL, side by side */
    const Table *tables;
    const uint8_t *q;
    uint8_t *o;
    float *lse;
    int64_t num_tables, batch, m, heads, width, head_dim, type; /* type: of q and o */
    int64_t q_row, q_head, layer; /* strides, in numbers; layer pages behind the base of tables */
    int64_t ahead;                /* units from one to what comes next on its thread, about */
    float scale, cap; /* cap: 0, or a score s counts as cap * tanh(s / cap) */
} Attention;

typedef struct { /* tokens of one layer, and where their blocks go */
    const Format *format;
    const uint8_t *k, *v;
    int64_t k_head, k_token, v_head, v_token; /* strides, in numbers */
    int64_t type, tokens, heads;
    uint8_t *blocks, *segments; /* segments: [S][heads][segment_bytes] */
    const int32_t *pages;       /* None: blocks lie in order */
    int64_t base, unit, segment_tokens;
} Encoding;

typedef struct { /* queries of a prompt; of their first SLOTS, `begun` came before */
    const uint8_t *q;
    double *sums; /* [units of SLOTS][heads][head_dim] */
    int64_t q_head, q_token, type, tokens, begun, heads, width, head_dim;
} Squares;

typedef struct { /* one token per row, [rows][heads][D], into raw pages; a page below 0 is none */
    uint8_t *arena;
    const uint8_t *k, *v;
    const int32_t *pages, *slots;
    int64_t rows, heads, k_row, k_head, v_row, v_head, type; /* strides, in numbers */
    const Format *format;
    int64_t base, layer;
} Append;

typedef struct { /* a layer of a step: new tokens, and attention to all */
    Append append;
    Attention attention;
} Step;

typedef struct { /* out = norm(sum) times weight, sum = x + factor * more; more may be NULL, and sum then too */
    const uint8_t *x, *more, *weight;
    uint8_t *sum, *out;
    int64_t rows, columns, x_row, more_row, type; /* sum and out have no gaps between rows */
    float epsilon, factor;
} Norm;

typedef struct { /* heads [rows][heads][head_dim], rotated where they lie; cosines and signed sines: [rows][head_dim] */
    uint8_t *x;
    const uint8_t *cosines, *sines;
    int64_t rows, heads, head_dim, x_row, type;
} Rotation;

typedef struct { /* out [rows][columns] = silu(x) times what lies `columns` numbers behind x */
    const uint8_t *x;
    uint8_t *out;
    int64_t rows, columns, x_row, type;
} Gate;

typedef struct { /* causal attention of the last `count` of `total` tokens, in bfloat16; strides in numbers */
    const uint16_t *q, *k, *v; /* v: of channels; rows have zeros up to a multiple of 32 tokens */
    uint16_t *out;
    int64_t count, total, heads, width, head_dim;
    int64_t q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row;
    float scale;
} Exact;

typedef struct { /* `rank` of `ranks` comes to meeting `number` */
    uint8_t *counters; /* of each rank: int64, a cache line apart */
    int64_t rank, ranks, number, wait_ns;
    int64_t late; /* what it says: a rank that has not come; -1 if all have */
} Meeting;

typedef void (*Job)(const void *job, int64_t unit);
void disagg_share(Job work, const void *job, int64_t units, int64_t threads);

typedef struct { /* one instruction set; attend_one: where each KV head has one query */
    const char *name;
    void (*attend)(const Attention *, int64_t unit), (*attend_one)(const Attention *, int64_t unit);
    void (*append)(const Append *, int64_t unit);
    void (*encode)(const Encoding *, int64_t unit);
    void (*sum_squares)(const Squares *, int64_t unit);
    void (*norm)(const Norm *, int64_t unit);
    void (*rotate)(const Rotation *, int64_t unit);
    void (*gate)(const Gate *, int64_t unit);
} Path;

extern const Path path_c, path_avx2, path_avx512vnni;
void one_c(const Attention *, int64_t), one_avx2(const Attention *, int64_t),
    one_avx512vnni(const Attention *, int64_t);
