/* RMSNorm per instruction set; see norms.body.h. */
#define SF_BODY "norms.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_norm_units[] = SF_TABLE(norm_unit);
