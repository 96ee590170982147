/* Gated DeltaNet per instruction set; see deltanet.body.h. */
#define SF_BODY "deltanet.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_conv_units[] = SF_TABLE(conv_unit);
static const sf_unit sf_delta_prepare_units[] = SF_TABLE(delta_prepare_unit);
static const sf_unit sf_delta_units[] = SF_TABLE(delta_unit);
