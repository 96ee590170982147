/* RMSNorm: x / sqrt(mean(x^2) + eps) * weight, optionally times silu(gate). Sums run in 16 lanes, then a fixed tree. */
#ifndef SF_NORMS_COMMON
#define SF_NORMS_COMMON

struct sf_norm {
    const float *x;      /* [rows][columns] */
    const float *weight; /* [columns] */
    const float *gate;   /* [rows][columns] or NULL */
    float *out;          /* [rows][columns]; may be x */
    long columns;
    float eps;
};
#endif

static void SF_NAME(norm_unit)(void *argument, long row, int worker)
{
    const struct sf_norm *call = argument;
    const long columns = call->columns;
    const float *x = call->x + row * columns;
    float *out = call->out + row * columns;
    F squares = f_set1(0.0f);
    (void)worker;
    for (long column = 0; column < columns; column += 16) {
        F v = f_load_first(x + column, columns - column < 16 ? (int)(columns - column) : 16);
        squares = f_fma(v, v, squares);
    }
    const float scale = 1.0f / sqrtf(f_sum(squares) / (float)columns + call->eps);
    for (long column = 0; column < columns; column += 16) {
        const int here = columns - column < 16 ? (int)(columns - column) : 16;
        F v = f_mul(f_mul(f_load_first(x + column, here), f_set1(scale)), f_load_first(call->weight + column, here));
        if (call->gate)
            v = f_mul(v, f_silu(f_load_first(call->gate + row * columns + column, here)));
        f_store_first(out + column, v, here);
    }
}
