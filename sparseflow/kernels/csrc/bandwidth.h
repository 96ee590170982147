/* Reading memory at full speed, per instruction set; see bandwidth.body.h. */
#define SF_BODY "bandwidth.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_read_units[] = SF_TABLE(read_unit);
