/* Rounds stored weights and puts them in tile order in one pass: a group of 128 columns of 16 rows at a time, which stays in
 * the first-level cache. A unit of work is a tile row.
 *
 * Scales and codes come from the operations of numpy, each correctly rounded: amax / 127 as float32, that to float16, and
 * w / scale by a true division (w * (1 / scale) differs in the last bit, which decides ties).
 */
#ifndef SF_PACKING_COMMON
#define SF_PACKING_COMMON

enum { SF_STORED_BF16, SF_STORED_FLOAT16, SF_STORED_FLOAT32 };
enum { SF_PACK_ROWS = 16, SF_PACK_GROUP = 128 };

struct sf_packing {
    const uint8_t *stored; /* [rows, columns] of a kind */
    int kind;
    long rows, columns, padded;
    uint8_t *tiles; /* a tile row every tile_stride bytes */
    long tile_stride;
    uint8_t *scales; /* of a tile row every scale_stride bytes; int8 only */
    long scale_stride;
    float *largest; /* [units] largest magnitude, infinite if any weight is infinite or NaN */
};
#endif

/* count (1..128) weights from the first on as float32, zeros behind them up to 128 */
SF_INLINE void SF_NAME(load_group)(const struct sf_packing *call, long row, long first, long count, float *out)
{
    const int width = call->kind == SF_STORED_FLOAT32 ? 4 : 2;
    const uint8_t *from = call->stored + (row * call->columns + first) * width;
    uint8_t part[4 * SF_PACK_GROUP] __attribute__((aligned(64)));
    if (count < SF_PACK_GROUP) {
        memset(part, 0, sizeof part);
        memcpy(part, from, (size_t)(count * width));
        from = part;
    }
    if (call->kind == SF_STORED_BF16)
        for (int k = 0; k < SF_PACK_GROUP; k += 16)
            f_store(out + k, f_load_bf16((const uint16_t *)(const void *)from + k));
    else if (call->kind == SF_STORED_FLOAT16)
        for (int k = 0; k < SF_PACK_GROUP; k += 16)
            f_store(out + k, f_load_half((const uint16_t *)(const void *)from + k));
    else
        for (int k = 0; k < SF_PACK_GROUP; k += 16)
            f_store(out + k, f_load((const float *)(const void *)from + k));
}

/* largest magnitude of 128 weights; *poison, 0 before, becomes NaN if any of them is infinite or NaN */
SF_INLINE float SF_NAME(magnitude)(const float *weights, F *poison)
{
    const F zero = f_set1(0.0f);
    F largest = zero;
    for (int k = 0; k < SF_PACK_GROUP; k += 16) {
        F w = f_load(weights + k);
        largest = f_max(largest, f_abs(w));
        *poison = f_add(*poison, f_mul(w, zero));
    }
    return f_largest(largest);
}

SF_INLINE float SF_NAME(infinite_if)(F poison, float largest) { return f_sum(poison) == 0.0f ? largest : (float)INFINITY; }

/* a word of every row to 16 neighbouring words, for each of `words` words */
SF_INLINE void SF_NAME(to_tile)(const uint8_t *rows, long row_bytes, long words, uint32_t flip, uint8_t *tile)
{
    for (long k = 0; k < words; k++)
        for (int row = 0; row < SF_PACK_ROWS; row++) {
            uint32_t word;
            memcpy(&word, rows + row * row_bytes + 4 * k, 4);
            word ^= flip;
            memcpy(tile + 64 * k + 4 * row, &word, 4);
        }
}

static void SF_NAME(pack_int8_unit)(void *argument, long unit, int worker)
{
    const struct sf_packing *call = argument;
    const long first_row = unit * SF_PACK_ROWS, left = call->rows - first_row;
    const int rows = left < SF_PACK_ROWS ? (int)left : SF_PACK_ROWS;
    float weights[SF_PACK_ROWS][SF_PACK_GROUP] __attribute__((aligned(64)));
    int8_t codes[SF_PACK_ROWS][SF_PACK_GROUP] __attribute__((aligned(64)));
    float amax[SF_PACK_ROWS] = {0}, divisors[SF_PACK_ROWS];
    F poison = f_set1(0.0f);
    float largest = 0.0f;
    (void)worker;
    memset(weights, 0, sizeof weights);
    for (long first = 0, group = 0; first < call->columns; first += SF_PACK_GROUP, group++) {
        const long columns = call->columns - first, padded = call->padded - first;
        uint8_t *tile = call->tiles + unit * call->tile_stride + first * SF_PACK_ROWS;
        uint16_t *scales = (uint16_t *)(void *)(call->scales + unit * call->scale_stride) + group * SF_PACK_ROWS;
        for (int row = 0; row < rows; row++) {
            SF_NAME(load_group)(call, first_row + row, first, columns < SF_PACK_GROUP ? columns : SF_PACK_GROUP, weights[row]);
            amax[row] = SF_NAME(magnitude)(weights[row], &poison);
        }
        f_store_half(scales, f_div(f_load(amax), f_set1(127.0f)));
        f_store(divisors, f_load_half(scales));
        largest = largest > f_largest(f_load(amax)) ? largest : f_largest(f_load(amax));
        for (int row = 0; row < SF_PACK_ROWS; row++) {
            /* A zero scale means |w| < 4e-6: dividing by one rounds it to zero as well. Only a subnormal scale needs the clip. */
            const F divisor = f_set1(divisors[row] == 0.0f ? 1.0f : divisors[row]);
            const F most = f_set1(127.0f), least = f_set1(-127.0f);
            for (int k = 0; k < SF_PACK_GROUP; k += 16) {
                F quotient = f_div(f_load(weights[row] + k), divisor);
                i_store_int8(codes[row] + k, f_round(f_max(f_min(quotient, most), least)));
            }
        }
        SF_NAME(to_tile)((const uint8_t *)codes, SF_PACK_GROUP, (padded < SF_PACK_GROUP ? padded : SF_PACK_GROUP) / 4,
                         0x80808080u, tile);
    }
    call->largest[unit] = SF_NAME(infinite_if)(poison, largest);
}

/* 128 float32 to bfloat16, nearest even */
SF_INLINE void SF_NAME(round_group)(const float *weights, uint16_t *out)
{
    for (int k = 0; k < SF_PACK_GROUP; k++) {
        uint32_t bits;
        memcpy(&bits, weights + k, 4);
        out[k] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

static void SF_NAME(pack_bf16_unit)(void *argument, long unit, int worker)
{
    const struct sf_packing *call = argument;
    const long first_row = unit * SF_PACK_ROWS, left = call->rows - first_row;
    const int rows = left < SF_PACK_ROWS ? (int)left : SF_PACK_ROWS;
    float weights[SF_PACK_GROUP] __attribute__((aligned(64)));
    uint16_t rounded[SF_PACK_ROWS][SF_PACK_GROUP] __attribute__((aligned(64)));
    F poison = f_set1(0.0f);
    float largest = 0.0f;
    (void)worker;
    memset(rounded, 0, sizeof rounded);
    for (long first = 0; first < call->columns; first += SF_PACK_GROUP) {
        const long columns = call->columns - first, padded = call->padded - first;
        for (int row = 0; row < rows; row++) {
            SF_NAME(load_group)(call, first_row + row, first, columns < SF_PACK_GROUP ? columns : SF_PACK_GROUP, weights);
            const float amax = SF_NAME(magnitude)(weights, &poison);
            largest = largest > amax ? largest : amax;
            SF_NAME(round_group)(weights, rounded[row]);
        }
        SF_NAME(to_tile)((const uint8_t *)rounded, 2 * SF_PACK_GROUP, (padded < SF_PACK_GROUP ? padded : SF_PACK_GROUP) / 2, 0,
                         call->tiles + unit * call->tile_stride + 2 * first * SF_PACK_ROWS);
    }
    call->largest[unit] = SF_NAME(infinite_if)(poison, largest);
}

/* 16 rows to bfloat16 in the order they are in: tiles is [rows, columns] uint16 */
static void SF_NAME(round_bf16_unit)(void *argument, long unit, int worker)
{
    const struct sf_packing *call = argument;
    const long last = (unit + 1) * SF_PACK_ROWS;
    float weights[SF_PACK_GROUP] __attribute__((aligned(64)));
    uint16_t rounded[SF_PACK_GROUP] __attribute__((aligned(64)));
    F poison = f_set1(0.0f);
    float largest = 0.0f;
    (void)worker;
    for (long row = unit * SF_PACK_ROWS; row < last && row < call->rows; row++)
        for (long first = 0; first < call->columns; first += SF_PACK_GROUP) {
            const long columns = call->columns - first, count = columns < SF_PACK_GROUP ? columns : SF_PACK_GROUP;
            SF_NAME(load_group)(call, row, first, count, weights);
            const float amax = SF_NAME(magnitude)(weights, &poison);
            largest = largest > amax ? largest : amax;
            SF_NAME(round_group)(weights, rounded);
            memcpy(call->tiles + 2 * (row * call->columns + first), rounded, 2 * (size_t)count);
        }
    call->largest[unit] = SF_NAME(infinite_if)(poison, largest);
}
