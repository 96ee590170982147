/* The routed experts of one layer for a set of (token, expert) pairs: gate, up, SwiGLU, down; and their ordered sum.
 *
 * An expert's slice is read straight from where it is leased. Three passes, each a set of independent units:
 * gate_up fills hidden rows, quantize turns them to codes (int8 only), down writes one output row per pair. The sum
 * over a token's experts comes last, in ascending expert id, so the order in which slices arrived leaves no trace.
 */
#include "tiles.body.h"
#ifndef SF_EXPERTS_COMMON
#define SF_EXPERTS_COMMON

struct sf_experts {
    const uint64_t *addresses; /* [experts] where each slice begins */
    const int32_t *pair_start; /* [experts] the first pair of each expert ... */
    const int32_t *pair_end;   /* ... and one past its last */
    const int32_t *pair_token; /* [pairs] row of x */
    const int32_t *pair_slot;  /* [pairs] row of out */
    long hidden, hidden_padded, intermediate, intermediate_padded;
    long gate_up_unit_tiles, down_unit_tiles; /* row tiles per unit of parallel work */
    long down_tiles, gate_up_scales, down_scales; /* byte offsets in a slice; gate_up tiles are at 0 */
    int bits;
    const float *x;            /* [tokens][hidden] */
    struct sf_quantized x_quantized;
    float *h;                  /* [pairs][intermediate_padded] */
    struct sf_quantized h_quantized;
    float *out;                /* [slots][hidden] */
};

struct sf_combine {
    const float *out;         /* [tokens][top_k][hidden], ascending expert id */
    const float *weights;     /* [tokens][top_k] */
    const float *shared;      /* [tokens][hidden] */
    const float *shared_gate; /* [tokens] before the sigmoid */
    float *residual;          /* [tokens][hidden], added to in place */
    long top_k, hidden;
};

struct sf_router {
    const float *logits;  /* [tokens][experts] */
    const int32_t *given; /* [tokens][top_k] to choose these, NULL to choose the largest */
    int ranked;           /* given is ordered, heaviest first, and the weights follow that order */
    int32_t *ids;         /* [tokens][top_k], ascending */
    float *weights;      /* [tokens][top_k] */
    long experts, top_k;
};
#endif

/* count rows of the activations through one tile; bits, count and down are constants at every call */
SF_INLINE void SF_NAME(expert_tile)(const struct sf_experts *call, int bits, int count, const uint8_t *slice,
                                    long tile_offset, long scale_offset, int down, const long *rows, F *out)
{
    if (bits == 8)
        SF_NAME(int8_tile)(count, slice + tile_offset, (const uint16_t *)(slice + scale_offset),
                           down ? &call->h_quantized : &call->x_quantized, rows, out);
    else if (down)
        SF_NAME(bf16_tile)(count, (const uint16_t *)(slice + tile_offset), call->intermediate, call->h,
                           call->intermediate_padded, rows, out);
    else
        SF_NAME(bf16_tile)(count, (const uint16_t *)(slice + tile_offset), call->hidden, call->x, call->hidden, rows,
                           out);
}

SF_INLINE void SF_NAME(gate_up_block)(const struct sf_experts *call, int bits, int count, const uint8_t *slice,
                                      long tile, long pair)
{
    const long tile_bytes = call->hidden_padded * SF_TILE_ROWS * (bits / 8);
    const long scale_bytes = (call->hidden_padded + SF_WEIGHT_GROUP - 1) / SF_WEIGHT_GROUP * SF_TILE_ROWS * 2;
    long rows[SF_INT8_ROWS];
    F gate[SF_INT8_ROWS], up[SF_INT8_ROWS];
    for (int m = 0; m < count; m++)
        rows[m] = call->pair_token[pair + m];
    SF_NAME(expert_tile)(call, bits, count, slice, 2 * tile * tile_bytes, call->gate_up_scales + 2 * tile * scale_bytes, 0,
                         rows, gate);
    SF_NAME(expert_tile)(call, bits, count, slice, (2 * tile + 1) * tile_bytes,
                         call->gate_up_scales + (2 * tile + 1) * scale_bytes, 0, rows, up);
    for (int m = 0; m < count; m++)
        f_store(call->h + (pair + m) * call->intermediate_padded + tile * SF_TILE_ROWS,
                f_mul(f_silu(gate[m]), up[m]));
}

SF_INLINE void SF_NAME(down_block)(const struct sf_experts *call, int bits, int count, const uint8_t *slice,
                                   long tile, long pair)
{
    const long tile_bytes = call->intermediate_padded * SF_TILE_ROWS * (bits / 8);
    const long scale_bytes = (call->intermediate_padded + SF_WEIGHT_GROUP - 1) / SF_WEIGHT_GROUP * SF_TILE_ROWS * 2;
    const long row = tile * SF_TILE_ROWS, left = call->hidden - row;
    long rows[SF_INT8_ROWS];
    F out[SF_INT8_ROWS];
    for (int m = 0; m < count; m++)
        rows[m] = pair + m;
    SF_NAME(expert_tile)(call, bits, count, slice, call->down_tiles + tile * tile_bytes,
                         call->down_scales + tile * scale_bytes, 1, rows, out);
    for (int m = 0; m < count; m++)
        f_store_first(call->out + (long)call->pair_slot[pair + m] * call->hidden + row, out[m],
                      left < 16 ? (int)left : 16);
}

/* One unit of row tiles of one expert's gate and up, or of its down, for all its pairs; down is a constant */
SF_INLINE void SF_NAME(expert_tiles)(const struct sf_experts *call, int down, long unit)
{
    const long rows = down ? call->hidden : call->intermediate;
    const long tiles = (rows + SF_TILE_ROWS - 1) / SF_TILE_ROWS;
    const long unit_tiles = down ? call->down_unit_tiles : call->gate_up_unit_tiles;
    const long units = (tiles + unit_tiles - 1) / unit_tiles;
    const long expert = unit / units, first = unit % units * unit_tiles;
    const long last = first + unit_tiles < tiles ? first + unit_tiles : tiles;
    const long start = call->pair_start[expert], end = call->pair_end[expert];
    const uint8_t *slice = (const uint8_t *)(uintptr_t)call->addresses[expert];
    for (long tile = first; tile < last; tile++) {
        long pair = start;
#define BLOCK(bits, count)                                              \
    (down ? SF_NAME(down_block)(call, bits, count, slice, tile, pair)   \
          : SF_NAME(gate_up_block)(call, bits, count, slice, tile, pair))
#define INT8_STEP(count) BLOCK(8, count)
#define BF16_STEP(count) BLOCK(16, count)
        if (call->bits == 8)
            SF_IN_BLOCKS(SF_INT8_ROWS, pair, end, INT8_STEP);
        else
            SF_IN_BLOCKS(SF_BF16_ROWS, pair, end, BF16_STEP);
#undef INT8_STEP
#undef BF16_STEP
#undef BLOCK
    }
    if (!down && last == tiles) /* the padding of a hidden row must not hold stale memory */
        for (long pair = start; pair < end; pair++)
            memset(call->h + pair * call->intermediate_padded + tiles * SF_TILE_ROWS, 0,
                   4 * (size_t)(call->intermediate_padded - tiles * SF_TILE_ROWS));
}

static void SF_NAME(expert_gate_up_unit)(void *argument, long unit, int worker)
{
    (void)worker;
    SF_NAME(expert_tiles)(argument, 0, unit);
}

static void SF_NAME(expert_quantize_unit)(void *argument, long expert, int worker)
{
    const struct sf_experts *call = argument;
    (void)worker;
    for (long pair = call->pair_start[expert]; pair < call->pair_end[expert]; pair++)
        SF_NAME(quantize_row)(call->h + pair * call->intermediate_padded, call->intermediate, &call->h_quantized, pair);
}

static void SF_NAME(expert_down_unit)(void *argument, long unit, int worker)
{
    (void)worker;
    SF_NAME(expert_tiles)(argument, 1, unit);
}

/* residual += sum over the token's experts of weight * out, ascending id, + sigmoid(gate) * shared */
static void SF_NAME(combine_unit)(void *argument, long token, int worker)
{
    const struct sf_combine *call = argument;
    float gates[16] = {call->shared_gate[token]};
    (void)worker;
    f_store(gates, f_sigmoid(f_load(gates)));
    for (long column = 0; column < call->hidden; column += 16) {
        const int here = call->hidden - column < 16 ? (int)(call->hidden - column) : 16;
        F sum = f_set1(0.0f);
        for (long k = 0; k < call->top_k; k++)
            sum = f_fma(f_set1(call->weights[token * call->top_k + k]),
                        f_load_first(call->out + (token * call->top_k + k) * call->hidden + column, here), sum);
        sum = f_fma(f_set1(gates[0]), f_load_first(call->shared + token * call->hidden + column, here), sum);
        float *residual = call->residual + token * call->hidden + column;
        f_store_first(residual, f_add(f_load_first(residual, here), sum), here);
    }
}

/* The top_k largest logits (ties: lowest id), weights exp(logit - largest) over their sum; ids ascending.
 * Equal to softmax over all experts, top_k, renormalised: the common denominator cancels.
 * Given experts are ranked and weighted the same way, so those that the router would choose get the router's bits. */
static void SF_NAME(router_unit)(void *argument, long token, int worker)
{
    const struct sf_router *call = argument;
    const float *logits = call->logits + token * call->experts;
    int32_t *ids = call->ids + token * call->top_k;
    float *weights = call->weights + token * call->top_k;
    const int32_t *given = call->given ? call->given + token * call->top_k : NULL;
    const long candidates = given ? call->top_k : call->experts;
    float sum = 0.0f;
    (void)worker;
    for (long expert = 0; expert < call->experts; expert++) /* zero; NaN if any logit is NaN or infinite, chosen or not */
        sum += 0.0f * logits[expert];
    for (long rank = 0; rank < call->top_k; rank++) { /* insertion into a list kept by falling logit */
        ids[rank] = -1;
        weights[rank] = -INFINITY;
    }
    for (long candidate = 0; candidate < candidates; candidate++) {
        const long expert = given ? given[candidate] : candidate;
        long rank = call->top_k;
        while (rank > 0 && (ids[rank - 1] < 0 || logits[expert] > weights[rank - 1]))
            rank--;
        if (rank == call->top_k)
            continue;
        for (long moved = call->top_k - 1; moved > rank; moved--) {
            ids[moved] = ids[moved - 1];
            weights[moved] = weights[moved - 1];
        }
        ids[rank] = (int32_t)expert;
        weights[rank] = logits[expert];
    }
    const F largest = f_set1(weights[0]);
    for (long rank = 0; rank < call->top_k; rank += 16) {
        const int here = call->top_k - rank < 16 ? (int)(call->top_k - rank) : 16;
        f_store_first(weights + rank, f_exp(f_sub(f_load_first(weights + rank, here), largest)), here);
    }
    for (long rank = 0; rank < call->top_k; rank++)
        sum += weights[rank];
    for (long rank = 0; rank < call->top_k; rank++)
        weights[rank] /= sum;
    if (given && call->ranked)
        memcpy(ids, given, sizeof *ids * (size_t)call->top_k);
    for (long rank = 1; rank < call->top_k; rank++) /* insertion sort by id */
        for (long moved = rank; moved > 0 && ids[moved - 1] > ids[moved]; moved--) {
            int32_t id = ids[moved];
            float weight = weights[moved];
            ids[moved] = ids[moved - 1];
            weights[moved] = weights[moved - 1];
            ids[moved - 1] = id;
            weights[moved - 1] = weight;
        }
}
