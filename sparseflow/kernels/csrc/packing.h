/* Stored weights to packed ones, per instruction set; see packing.body.h. */
#define SF_BODY "packing.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_pack_int8_units[] = SF_TABLE(pack_int8_unit);
static const sf_unit sf_pack_bf16_units[] = SF_TABLE(pack_bf16_unit);
static const sf_unit sf_round_bf16_units[] = SF_TABLE(round_bf16_unit);
