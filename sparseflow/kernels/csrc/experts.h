/* Routed experts, their ordered sum and the router, per instruction set; see experts.body.h. */
#define SF_BODY "experts.body.h"
#include "each_target.h"
#undef SF_BODY

typedef void (*sf_unit)(void *argument, long unit, int worker);

static const sf_unit sf_expert_gate_up_units[] = SF_TABLE(expert_gate_up_unit);
static const sf_unit sf_expert_quantize_units[] = SF_TABLE(expert_quantize_unit);
static const sf_unit sf_expert_down_units[] = SF_TABLE(expert_down_unit);
static const sf_unit sf_combine_units[] = SF_TABLE(combine_unit);
static const sf_unit sf_router_units[] = SF_TABLE(router_unit);
