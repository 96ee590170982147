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

static const char *sf_expert_gate_up_weights(const void *argument, long unit)
{
    const struct sf_experts *call = argument;
    const long tiles = (call->intermediate + SF_TILE_ROWS - 1) / SF_TILE_ROWS;
    const long units = (tiles + call->gate_up_unit_tiles - 1) / call->gate_up_unit_tiles;
    const long first = 2 * (unit % units * call->gate_up_unit_tiles);
    return (const char *)(uintptr_t)call->addresses[unit / units] + first * call->hidden_padded * SF_TILE_ROWS * (call->bits / 8);
}

static const char *sf_expert_down_weights(const void *argument, long unit)
{
    const struct sf_experts *call = argument;
    const long tiles = (call->hidden + SF_TILE_ROWS - 1) / SF_TILE_ROWS;
    const long units = (tiles + call->down_unit_tiles - 1) / call->down_unit_tiles;
    const long first = unit % units * call->down_unit_tiles;
    return (const char *)(uintptr_t)call->addresses[unit / units] + call->down_tiles
           + first * call->intermediate_padded * SF_TILE_ROWS * (call->bits / 8);
}
