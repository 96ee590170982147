/* Quantisation of activations and matrix products, per instruction set; see linear.body.h. */
#define SF_BODY "linear.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_quantize_units[] = SF_TABLE(quantize_unit);
static const sf_unit sf_linear_int8_units[] = SF_TABLE(linear_int8_unit);
static const sf_unit sf_linear_bf16_units[] = SF_TABLE(linear_bf16_unit);
