/* Gated attention per instruction set; see attention.body.h. */
#define SF_BODY "attention.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_attention_append_units[] = SF_TABLE(attention_append_unit);
static const sf_unit sf_attention_units[] = SF_TABLE(attention_unit);
