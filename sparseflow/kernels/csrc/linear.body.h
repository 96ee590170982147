/* y = x W^T for a matrix in tiles; a unit of work is a few row tiles for all tokens. */
#include "tiles.body.h"
#ifndef SF_LINEAR_COMMON
#define SF_LINEAR_COMMON

struct sf_linear {
    const uint8_t *int8_tiles;
    const uint16_t *int8_scales;
    const uint16_t *bf16_tiles;
    struct sf_quantized quantized; /* int8: the activations */
    const float *x;                /* bf16: the activations, [tokens][columns] */
    float *y;                      /* [tokens][rows] */
    long tokens, rows, columns, padded;
    long unit_tiles;
    int onto;                      /* y is added to, not replaced */
};
#endif

static void SF_NAME(quantize_unit)(void *argument, long token, int worker)
{
    const struct sf_linear *call = argument;
    (void)worker;
    SF_NAME(quantize_row)(call->x + token * call->columns, call->columns, &call->quantized, token);
}

SF_INLINE void SF_NAME(linear_store_row)(const struct sf_linear *call, float *y, F out, int count)
{
    f_store_first(y, call->onto ? f_add(f_load_first(y, count), out) : out, count);
}

SF_INLINE void SF_NAME(linear_store)(const struct sf_linear *call, long tile, long token, int count, const F *out)
{
    const long row = tile * SF_TILE_ROWS, left = call->rows - row;
    for (int m = 0; m < count; m++)
        SF_NAME(linear_store_row)(call, call->y + (token + m) * call->rows + row, out[m], left < 16 ? (int)left : 16);
}

SF_INLINE void SF_NAME(linear_int8_block)(const struct sf_linear *call, int count, long tile, long token)
{
    const long groups = (call->padded + SF_WEIGHT_GROUP - 1) / SF_WEIGHT_GROUP;
    long rows[SF_INT8_ROWS];
    F out[SF_INT8_ROWS];
    for (int m = 0; m < count; m++)
        rows[m] = token + m;
    SF_NAME(int8_tile)(count, call->int8_tiles + tile * call->padded * SF_TILE_ROWS,
                       call->int8_scales + tile * groups * SF_TILE_ROWS, &call->quantized, rows, out);
    SF_NAME(linear_store)(call, tile, token, count, out);
}

SF_INLINE void SF_NAME(linear_bf16_block)(const struct sf_linear *call, int count, long tile, long token)
{
    long rows[SF_BF16_ROWS];
    F out[SF_BF16_ROWS];
    for (int m = 0; m < count; m++)
        rows[m] = token + m;
    SF_NAME(bf16_tile)(count, call->bf16_tiles + tile * call->padded * SF_TILE_ROWS, call->columns, call->x,
                       call->columns, rows, out);
    SF_NAME(linear_store)(call, tile, token, count, out);
}

/* One unit of row tiles for all tokens; bits is a constant */
SF_INLINE void SF_NAME(linear_tiles)(const struct sf_linear *call, int bits, long unit)
{
    const long tiles = (call->rows + SF_TILE_ROWS - 1) / SF_TILE_ROWS;
    const long first = unit * call->unit_tiles, last = first + call->unit_tiles < tiles ? first + call->unit_tiles : tiles;
    for (long tile = first; tile < last; tile++) {
        long token = 0;
#define INT8_STEP(count) SF_NAME(linear_int8_block)(call, count, tile, token)
#define BF16_STEP(count) SF_NAME(linear_bf16_block)(call, count, tile, token)
        if (bits == 8)
            SF_IN_BLOCKS(SF_INT8_ROWS, token, call->tokens, INT8_STEP);
        else
            SF_IN_BLOCKS(SF_BF16_ROWS, token, call->tokens, BF16_STEP);
#undef INT8_STEP
#undef BF16_STEP
    }
}

static void SF_NAME(linear_int8_unit)(void *argument, long unit, int worker)
{
    (void)worker;
    SF_NAME(linear_tiles)(argument, 8, unit);
}

static void SF_NAME(linear_bf16_unit)(void *argument, long unit, int worker)
{
    (void)worker;
    SF_NAME(linear_tiles)(argument, 16, unit);
}
