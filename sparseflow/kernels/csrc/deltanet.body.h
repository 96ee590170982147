/* Gated DeltaNet between its projections: causal convolution, normalised q and k, gates, and the delta rule.
 *
 * A chunk is the step repeated: the state of one value head, 16 value columns at a time (key_dim x 16 floats, which
 * stays in L1), is carried through all tokens by one unit of work. So a chunk of any length gives the bits of single
 * steps. State layout: [value_heads][value_blocks][key_dim][16].
 */
#ifndef SF_DELTANET_COMMON
#define SF_DELTANET_COMMON

enum { SF_CONV_BLOCK = 256 }; /* channels per unit */

struct sf_conv {
    const float *x;      /* [tokens][channels] */
    const float *weight; /* [kernel][channels] */
    float *state;        /* [kernel - 1][channels]: the inputs before x, oldest first; replaced by the last ones */
    float *out;          /* [tokens][channels], must not be x */
    long tokens, channels, kernel;
};

struct sf_delta {
    float *qkv;                /* [tokens][2 * key_dim * key_heads + value_dim * value_heads]; q and k are normalised here */
    const float *a, *b;        /* [tokens][value_heads] */
    const float *decay_rate;   /* [value_heads] -exp(A_log) */
    const float *dt_bias;      /* [value_heads] */
    float *decay, *beta;       /* [tokens][value_heads] scratch */
    float *state;
    float *out;                /* [tokens][value_heads][value_dim] */
    long tokens, key_heads, value_heads, key_dim, value_dim;
};
#endif

static void SF_NAME(conv_unit)(void *argument, long unit, int worker)
{
    const struct sf_conv *call = argument;
    const long first = unit * SF_CONV_BLOCK, channels = call->channels, kernel = call->kernel;
    const long last = first + SF_CONV_BLOCK < channels ? first + SF_CONV_BLOCK : channels;
    (void)worker;
    for (long channel = first; channel < last; channel += 16) {
        const int here = last - channel < 16 ? (int)(last - channel) : 16;
        for (long token = 0; token < call->tokens; token++) {
            F sum = f_set1(0.0f);
            for (long tap = 0; tap < kernel; tap++) {
                const long source = token + tap - (kernel - 1);
                const float *x = source < 0 ? call->state + (kernel - 1 + source) * channels
                                            : call->x + source * channels;
                sum = f_fma(f_load_first(call->weight + tap * channels + channel, here),
                            f_load_first(x + channel, here), sum);
            }
            f_store_first(call->out + token * channels + channel, f_silu(sum), here);
        }
        for (long kept = 0; kept < kernel - 1; kept++) { /* ascending, so a source is read before it is replaced */
            const long source = call->tokens + kept - (kernel - 1);
            const float *x = source < 0 ? call->state + (kernel - 1 + source) * channels
                                        : call->x + source * channels;
            f_store_first(call->state + kept * channels + channel, f_load_first(x + channel, here), here);
        }
    }
}

/* one token: q and k of every key head to unit length (q also / sqrt(key_dim)); decay = exp(g), beta */
static void SF_NAME(delta_prepare_unit)(void *argument, long token, int worker)
{
    const struct sf_delta *call = argument;
    const long key_dim = call->key_dim, heads = call->value_heads;
    float *qk = call->qkv + token * (2 * call->key_heads * key_dim + heads * call->value_dim);
    (void)worker;
    for (long head = 0; head < 2 * call->key_heads; head++) {
        float *v = qk + head * key_dim;
        F squares = f_set1(0.0f);
        for (long k = 0; k < key_dim; k += 16) {
            F part = f_load_first(v + k, key_dim - k < 16 ? (int)(key_dim - k) : 16);
            squares = f_fma(part, part, squares);
        }
        float scale = 1.0f / sqrtf(f_sum(squares) + 1e-6f);
        if (head < call->key_heads)
            scale /= sqrtf((float)key_dim);
        for (long k = 0; k < key_dim; k += 16) {
            const int here = key_dim - k < 16 ? (int)(key_dim - k) : 16;
            f_store_first(v + k, f_mul(f_load_first(v + k, here), f_set1(scale)), here);
        }
    }
    for (long head = 0; head < heads; head += 16) {
        const int here = heads - head < 16 ? (int)(heads - head) : 16;
        F a = f_load_first(call->a + token * heads + head, here), b = f_load_first(call->b + token * heads + head, here);
        F step = f_softplus(f_add(a, f_load_first(call->dt_bias + head, here)));
        f_store_first(call->decay + token * heads + head,
                      f_exp(f_mul(f_load_first(call->decay_rate + head, here), step)), here);
        f_store_first(call->beta + token * heads + head, f_sigmoid(b), here);
    }
}

/* 16 value columns of one value head through all tokens:
 * S *= decay; delta = beta * (v - S^T k); S += k delta^T; out = S^T q. Sums over key_dim in four chains (k mod 4). */
static void SF_NAME(delta_unit)(void *argument, long unit, int worker)
{
    const struct sf_delta *call = argument;
    const long key_dim = call->key_dim, value_dim = call->value_dim, heads = call->value_heads;
    const long blocks = (value_dim + 15) / 16, head = unit / blocks, block = unit % blocks;
    const long key_head = head / (heads / call->key_heads), stride = 2 * call->key_heads * key_dim + heads * value_dim;
    const int here = value_dim - 16 * block < 16 ? (int)(value_dim - 16 * block) : 16;
    float *state = call->state + unit * key_dim * 16;
    (void)worker;
    for (long token = 0; token < call->tokens; token++) {
        const float *q = call->qkv + token * stride + key_head * key_dim;
        const float *k = q + call->key_heads * key_dim;
        const F v = f_load_first(call->qkv + token * stride + 2 * call->key_heads * key_dim + head * value_dim + 16 * block,
                                 here);
        const F decay = f_set1(call->decay[token * heads + head]), beta = f_set1(call->beta[token * heads + head]);
        F sum[4];
        for (int c = 0; c < 4; c++)
            sum[c] = f_set1(0.0f);
        for (long i = 0; i < key_dim; i += 4)
            for (int c = 0; c < 4 && i + c < key_dim; c++) {
                F s = f_mul(f_load(state + (i + c) * 16), decay);
                f_store(state + (i + c) * 16, s);
                sum[c] = f_fma(f_set1(k[i + c]), s, sum[c]);
            }
        const F recalled = f_add(f_add(sum[0], sum[1]), f_add(sum[2], sum[3]));
        const F delta = f_mul(f_sub(v, recalled), beta);
        for (int c = 0; c < 4; c++)
            sum[c] = f_set1(0.0f);
        for (long i = 0; i < key_dim; i += 4)
            for (int c = 0; c < 4 && i + c < key_dim; c++) {
                F s = f_fma(f_set1(k[i + c]), delta, f_load(state + (i + c) * 16));
                f_store(state + (i + c) * 16, s);
                sum[c] = f_fma(f_set1(q[i + c]), s, sum[c]);
            }
        f_store_first(call->out + (token * heads + head) * value_dim + 16 * block,
                      f_add(f_add(sum[0], sum[1]), f_add(sum[2], sum[3])), here);
    }
}
