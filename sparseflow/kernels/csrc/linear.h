/* Quantisation of activations and matrix products, per instruction set; see linear.body.h. */
#define SF_BODY "linear.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_quantize_units[] = SF_TABLE(quantize_unit);
static const sf_unit sf_linear_int8_units[] = SF_TABLE(linear_int8_unit);
static const sf_unit sf_linear_bf16_units[] = SF_TABLE(linear_bf16_unit);

static const char *sf_linear_weights(const void *argument, long unit)
{
    const struct sf_linear *call = argument;
    const long first = unit * call->unit_tiles * call->padded * SF_TILE_ROWS;
    return call->int8_tiles ? (const char *)(call->int8_tiles + first) : (const char *)(call->bf16_tiles + first);
}
