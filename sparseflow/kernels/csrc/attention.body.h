/* Gated attention between its projections: q/k RMSNorm, partial rotary, append to the KV cache, softmax(q k) v, gate.
 *
 * The cache is a list of pages of SF_PAGE positions. Keys lie as [kv_heads][SF_PAGE / 16][head_dim][16 positions], so
 * that 16 scores are 16 lanes; values as [kv_heads][SF_PAGE][head_dim]. Scores sum over head_dim in order, the output
 * over positions in order: neither depends on how many tokens are fed at once.
 */
#ifndef SF_ATTENTION_COMMON
#define SF_ATTENTION_COMMON

enum {
    SF_PAGE = 64,
    SF_HEADS_AT_ONCE = 4, /* query heads of one kv head that share a pass over the cache */
};

struct sf_attention {
    float *q_gate;              /* [tokens][heads][2 * head_dim]: query, then its gate; the query is rotated in place */
    float *k;                   /* [tokens][kv_heads][head_dim], rotated in place */
    const float *v;             /* [tokens][kv_heads][head_dim] */
    const float *q_weight, *k_weight; /* [head_dim], 1 added */
    const float *cosine, *sine; /* [tokens][rotary_dim / 2] */
    const uint64_t *key_pages, *value_pages;
    float *scores;              /* [workers][SF_HEADS_AT_ONCE][score_stride] scratch */
    float *out;                 /* [tokens][heads][head_dim] */
    const int64_t *position; /* one */
    long tokens, heads, kv_heads, head_dim, rotary_dim, score_stride;
    float eps;
};
#endif

/* RMSNorm of one head vector, then rotation of its first rotary_dim elements in pairs (i, i + rotary_dim / 2) */
SF_INLINE void SF_NAME(norm_and_rotate)(const struct sf_attention *call, float *v, const float *weight, long token)
{
    const long dim = call->head_dim, half = call->rotary_dim / 2;
    const float *cosine = call->cosine + token * half, *sine = call->sine + token * half;
    F squares = f_set1(0.0f);
    for (long i = 0; i < dim; i += 16) {
        F part = f_load_first(v + i, dim - i < 16 ? (int)(dim - i) : 16);
        squares = f_fma(part, part, squares);
    }
    const float scale = 1.0f / sqrtf(f_sum(squares) / (float)dim + call->eps);
    for (long i = 0; i < dim; i += 16) {
        const int here = dim - i < 16 ? (int)(dim - i) : 16;
        f_store_first(v + i, f_mul(f_mul(f_load_first(v + i, here), f_set1(scale)), f_load_first(weight + i, here)),
                      here);
    }
    for (long i = 0; i < half; i += 16) {
        const int here = half - i < 16 ? (int)(half - i) : 16;
        const F c = f_load_first(cosine + i, here), s = f_load_first(sine + i, here);
        const F low = f_load_first(v + i, here), high = f_load_first(v + half + i, here);
        f_store_first(v + i, f_sub(f_mul(low, c), f_mul(high, s)), here);
        f_store_first(v + half + i, f_add(f_mul(high, c), f_mul(low, s)), here);
    }
}

/* one token: rotate its queries; rotate its keys and append them and the values to the cache */
static void SF_NAME(attention_append_unit)(void *argument, long token, int worker)
{
    const struct sf_attention *call = argument;
    const long dim = call->head_dim, position = *call->position + token, slot = position % SF_PAGE;
    float *key_page = (float *)(uintptr_t)call->key_pages[position / SF_PAGE];
    float *value_page = (float *)(uintptr_t)call->value_pages[position / SF_PAGE];
    (void)worker;
    for (long head = 0; head < call->heads; head++)
        SF_NAME(norm_and_rotate)(call, call->q_gate + (token * call->heads + head) * 2 * dim, call->q_weight, token);
    for (long head = 0; head < call->kv_heads; head++) {
        float *k = call->k + (token * call->kv_heads + head) * dim;
        const float *v = call->v + (token * call->kv_heads + head) * dim;
        float *lanes = key_page + (head * (SF_PAGE / 16) + slot / 16) * dim * 16 + slot % 16;
        SF_NAME(norm_and_rotate)(call, k, call->k_weight, token);
        for (long i = 0; i < dim; i++)
            lanes[i * 16] = k[i];
        memcpy(value_page + (head * SF_PAGE + slot) * dim, v, 4 * (size_t)dim);
    }
}

/* up to SF_HEADS_AT_ONCE query heads of one kv head, one token; count is a constant at every call */
SF_INLINE void SF_NAME(attend)(const struct sf_attention *call, int count, long token, long kv_head, long first_head,
                               float *scores)
{
    const long dim = call->head_dim, positions = *call->position + token + 1;
    const F scale = f_set1(1.0f / sqrtf((float)dim));
    const float *q[SF_HEADS_AT_ONCE];
    float sum[SF_HEADS_AT_ONCE];
    for (int h = 0; h < count; h++)
        q[h] = call->q_gate + (token * call->heads + first_head + h) * 2 * dim;

    for (long block = 0; block * 16 < positions; block++) {
        const float *page = (const float *)(uintptr_t)call->key_pages[block / (SF_PAGE / 16)];
        const float *keys = page + (kv_head * (SF_PAGE / 16) + block % (SF_PAGE / 16)) * dim * 16;
        F dot[SF_HEADS_AT_ONCE];
        for (int h = 0; h < count; h++)
            dot[h] = f_set1(0.0f);
        for (long i = 0; i < dim; i++) {
            const F k = f_load(keys + i * 16);
            for (int h = 0; h < count; h++)
                dot[h] = f_fma(f_set1(q[h][i]), k, dot[h]);
        }
        for (int h = 0; h < count; h++)
            f_store(scores + h * call->score_stride + block * 16, f_mul(dot[h], scale));
    }

    for (int h = 0; h < count; h++) {
        float *row = scores + h * call->score_stride;
        for (long i = positions; i % 16; i++) /* positions that are not there yet */
            row[i] = -INFINITY;
        F largest = f_set1(-INFINITY), total = f_set1(0.0f);
        for (long i = 0; i < positions; i += 16)
            largest = f_max(largest, f_load(row + i));
        largest = f_set1(f_largest(largest));
        for (long i = 0; i < positions; i += 16) {
            f_store(row + i, f_exp(f_sub(f_load(row + i), largest)));
            for (long gone = positions; gone < i + 16; gone++)
                row[gone] = 0.0f;
            total = f_add(total, f_load(row + i));
        }
        sum[h] = f_sum(total);
    }

    for (long i = 0; i < dim; i += 16) {
        const int here = dim - i < 16 ? (int)(dim - i) : 16;
        F out[SF_HEADS_AT_ONCE];
        for (int h = 0; h < count; h++)
            out[h] = f_set1(0.0f);
        for (long first = 0; first < positions; first += SF_PAGE) {
            const float *page = (const float *)(uintptr_t)call->value_pages[first / SF_PAGE];
            const float *values = page + kv_head * SF_PAGE * dim + i;
            const long last = positions - first < SF_PAGE ? positions - first : SF_PAGE;
            for (long slot = 0; slot < last; slot++) {
                const F v = f_load_first(values + slot * dim, here);
                for (int h = 0; h < count; h++)
                    out[h] = f_fma(f_set1(scores[h * call->score_stride + first + slot]), v, out[h]);
            }
        }
        for (int h = 0; h < count; h++) {
            const F gate = f_load_first(q[h] + dim + i, here);
            f_store_first(call->out + (token * call->heads + first_head + h) * dim + i,
                          f_mul(f_div(out[h], f_set1(sum[h])), f_sigmoid(gate)), here);
        }
    }
}

static void SF_NAME(attention_unit)(void *argument, long unit, int worker)
{
    const struct sf_attention *call = argument;
    const long group = call->heads / call->kv_heads, parts = (group + SF_HEADS_AT_ONCE - 1) / SF_HEADS_AT_ONCE;
    const long token = unit / (call->kv_heads * parts), kv_head = unit / parts % call->kv_heads;
    const long first = unit % parts * SF_HEADS_AT_ONCE;
    const long count = group - first < SF_HEADS_AT_ONCE ? group - first : SF_HEADS_AT_ONCE;
    float *scores = call->scores + worker * SF_HEADS_AT_ONCE * call->score_stride;
    if (count == SF_HEADS_AT_ONCE)
        SF_NAME(attend)(call, SF_HEADS_AT_ONCE, token, kv_head, kv_head * group + first, scores);
    else
        for (long head = first; head < first + count; head++)
            SF_NAME(attend)(call, 1, token, kv_head, kv_head * group + head, scores);
}
