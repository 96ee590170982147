/* y = x W^T for a matrix in tiles; a unit of work is SF_UNIT_TILES row tiles for all tokens. */
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
};
#endif

static void SF_NAME(quantize_unit)(void *argument, long token, int worker)
{
    const struct sf_linear *call = argument;
    (void)worker;
    SF_NAME(quantize_row)(call->x + token * call->columns, call->columns, &call->quantized, token);
}

SF_INLINE void SF_NAME(linear_store)(const struct sf_linear *call, long tile, long token, int count, const F *out)
{
    const long row = tile * SF_TILE_ROWS, left = call->rows - row;
    for (int m = 0; m < count; m++)
        f_store_first(call->y + (token + m) * call->rows + row, out[m], left < 16 ? (int)left : 16);
}

static void SF_NAME(linear_int8_unit)(void *argument, long unit, int worker)
{
    const struct sf_linear *call = argument;
    const long groups = (call->padded + SF_WEIGHT_GROUP - 1) / SF_WEIGHT_GROUP;
    const long tiles = (call->rows + SF_TILE_ROWS - 1) / SF_TILE_ROWS;
    const long first = unit * SF_UNIT_TILES, last = first + SF_UNIT_TILES < tiles ? first + SF_UNIT_TILES : tiles;
    (void)worker;
    for (long tile = first; tile < last; tile++) {
        const uint8_t *weights = call->int8_tiles + tile * call->padded * SF_TILE_ROWS;
        const uint16_t *scales = call->int8_scales + tile * groups * SF_TILE_ROWS;
        long token = 0;
        F out[SF_INT8_ROWS];
        for (; token + SF_INT8_ROWS <= call->tokens; token += SF_INT8_ROWS) {
            long rows[SF_INT8_ROWS];
            for (int m = 0; m < SF_INT8_ROWS; m++)
                rows[m] = token + m;
            SF_NAME(int8_tile)(SF_INT8_ROWS, weights, scales, &call->quantized, rows, out);
            SF_NAME(linear_store)(call, tile, token, SF_INT8_ROWS, out);
        }
        for (; token < call->tokens; token++) {
            SF_NAME(int8_tile)(1, weights, scales, &call->quantized, &token, out);
            SF_NAME(linear_store)(call, tile, token, 1, out);
        }
    }
}

static void SF_NAME(linear_bf16_unit)(void *argument, long unit, int worker)
{
    const struct sf_linear *call = argument;
    const long tiles = (call->rows + SF_TILE_ROWS - 1) / SF_TILE_ROWS;
    const long first = unit * SF_UNIT_TILES, last = first + SF_UNIT_TILES < tiles ? first + SF_UNIT_TILES : tiles;
    (void)worker;
    for (long tile = first; tile < last; tile++) {
        const uint16_t *weights = call->bf16_tiles + tile * call->padded * SF_TILE_ROWS;
        long token = 0;
        F out[SF_BF16_ROWS];
        for (; token + SF_BF16_ROWS <= call->tokens; token += SF_BF16_ROWS) {
            long rows[SF_BF16_ROWS];
            for (int m = 0; m < SF_BF16_ROWS; m++)
                rows[m] = token + m;
            SF_NAME(bf16_tile)(SF_BF16_ROWS, weights, call->columns, call->x, call->columns, rows, out);
            SF_NAME(linear_store)(call, tile, token, SF_BF16_ROWS, out);
        }
        for (; token < call->tokens; token++) {
            SF_NAME(bf16_tile)(1, weights, call->columns, call->x, call->columns, &token, out);
            SF_NAME(linear_store)(call, tile, token, 1, out);
        }
    }
}
