/* One row tile (16 output rows) times a few rows of activations: the inner loop of every matrix product.
 * Included once per target, before the kernel that uses it.
 *
 * int8 tile: [K/4][16 rows][4 k] uint8 (code + 128), scales float16 [K/128][16]; activations are int8 codes with one
 * float32 scale per 32. bf16 tile: [K/2][16 rows][2 k] bfloat16, activations float32. K is padded to a multiple of 32.
 */
#ifndef SF_TILES_COMMON
#define SF_TILES_COMMON
#include "quantized.h"

enum {
    SF_TILE_ROWS = 16,
    SF_WEIGHT_GROUP = 128,
    SF_ACTIVATION_GROUP = 32,
    SF_UNIT_BYTES = 65536, /* of weights per unit of parallel work */
    SF_MOST_UNIT_TILES = 8,
};

/* Whether the hardware leaves prefetching to the program: all but AMD's, of those with AVX-512. */
static int sf_prefetches_itself = 1;

#if defined(__x86_64__)
__attribute__((constructor)) static void sf_look_at_processor(void)
{
    __builtin_cpu_init();
    sf_prefetches_itself = !__builtin_cpu_is("amd");
}
#endif

/* Row tiles of so many bytes each that make a unit of parallel work. */
static inline long sf_unit_tiles(long tile_bytes)
{
    const long tiles = SF_UNIT_BYTES / tile_bytes;
    return tiles < 1 ? 1 : tiles > SF_MOST_UNIT_TILES ? SF_MOST_UNIT_TILES : tiles;
}

/* STEP(count) for the rows of activations from `at` to `end`, in blocks of `most` (a constant), then of 4, 2 and 1 */
#define SF_IN_BLOCKS(most, at, end, STEP)                    \
    do {                                                     \
        for (; (at) + (most) <= (end); (at) += (most))       \
            STEP(most);                                      \
        if ((most) > 4 && (at) + 4 <= (end)) {               \
            STEP(4);                                         \
            (at) += 4;                                       \
        }                                                    \
        if ((most) > 2 && (at) + 2 <= (end)) {               \
            STEP(2);                                         \
            (at) += 2;                                       \
        }                                                    \
        for (; (at) < (end); (at)++)                         \
            STEP(1);                                         \
    } while (0)
#endif

#undef SF_PREFETCHES
#undef SF_PREFETCH_BYTES
#undef SF_PREFETCH_INTO
#undef SF_INT8_ROWS
#undef SF_BF16_ROWS
#define W SF_NAME(sf_w)
#define w_load SF_NAME(w_load)
#define i_dot_start SF_NAME(i_dot_start)
#define i_dot SF_NAME(i_dot)

#if SF_LANES_AVX512
typedef __m512i W;
SF_INLINE W w_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
SF_INLINE I i_dot_start(int32_t correction) { return _mm512_set1_epi32(correction); }
SF_INLINE I i_dot(I sum, W w, const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
}
#elif SF_LANES_AVX2
/* maddubs takes unsigned by signed and saturates at 16 bits: |w| <= 128 times x carrying w's sign stays below it */
typedef struct { __m256i low, high, low_size, high_size; } W;
SF_INLINE W w_load(const uint8_t *p)
{
    __m256i offset = _mm256_set1_epi8((char)0x80);
    __m256i low = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)p), offset);
    __m256i high = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(p + 32)), offset);
    return (W){low, high, _mm256_abs_epi8(low), _mm256_abs_epi8(high)};
}
SF_INLINE I i_dot_start(int32_t correction)
{
    (void)correction;
    return i_set1(0);
}
SF_INLINE I i_dot(I sum, W w, const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, 4);
    __m256i k = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_madd_epi16(_mm256_maddubs_epi16(w.low_size, _mm256_sign_epi8(k, w.low)), ones);
    __m256i high = _mm256_madd_epi16(_mm256_maddubs_epi16(w.high_size, _mm256_sign_epi8(k, w.high)), ones);
    return (I){_mm256_add_epi32(sum.a, low), _mm256_add_epi32(sum.b, high)};
}
#else
typedef const uint8_t *W;
SF_INLINE W w_load(const uint8_t *p) { return p; }
SF_INLINE I i_dot_start(int32_t correction)
{
    (void)correction;
    return i_set1(0);
}
SF_INLINE I i_dot(I sum, W w, const int8_t *x)
{
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 4; k++)
            sum.v[row] += ((int32_t)w[4 * row + k] - 128) * x[k];
    return sum;
}
#endif

/* How far ahead of itself a pass over a tile prefetches, into which caches (3: all, 0: past all but the nearest, so that weights
 * push nothing else out; measured: a Xeon with AVX-512 wants it far, a Zen 3 near and past, and a Zen 4 with AVX-512 not at all:
 * there it costs a core a quarter of its bandwidth), and how many rows of activations share one: as many as the registers hold. */
#if SF_LANES_AVX512
#define SF_PREFETCHES sf_prefetches_itself
#define SF_PREFETCH_BYTES 8192
#define SF_PREFETCH_INTO 3
#define SF_INT8_ROWS 8
#define SF_BF16_ROWS 4
#elif SF_LANES_AVX2
#define SF_PREFETCHES 1
#define SF_PREFETCH_BYTES 1024
#define SF_PREFETCH_INTO 0
#define SF_INT8_ROWS 4
#define SF_BF16_ROWS 1
#else
#define SF_PREFETCHES 1
#define SF_PREFETCH_BYTES 1024
#define SF_PREFETCH_INTO 3
#define SF_INT8_ROWS 1
#define SF_BF16_ROWS 1
#endif

/* out[m] = tile . activations row rows[m], for m < count; count is a constant at every call */
SF_INLINE void SF_NAME(int8_tile)(int count, const uint8_t *tile, const uint16_t *tile_scales,
                                  const struct sf_quantized *x, const long *rows, F *out)
{
    const long groups = x->padded / SF_ACTIVATION_GROUP;
    const int8_t *codes[SF_INT8_ROWS];
    const float *scales[SF_INT8_ROWS];
    const int32_t *corrections[SF_INT8_ROWS];
    for (int m = 0; m < count; m++) {
        codes[m] = x->codes + rows[m] * x->padded;
        scales[m] = x->scales + rows[m] * groups;
        corrections[m] = x->corrections + rows[m] * groups;
        out[m] = f_set1(0.0f);
    }
    for (long first = 0; first < groups; first += 4) {
        const long last = first + 4 < groups ? first + 4 : groups;
        F group_sum[SF_INT8_ROWS];
        for (int m = 0; m < count; m++)
            group_sum[m] = f_set1(0.0f);
        for (long group = first; group < last; group++) {
            I dot[SF_INT8_ROWS];
            for (int m = 0; m < count; m++)
                dot[m] = i_dot_start(corrections[m][group]);
            for (int four = 0; four < 8; four++) {
                if (count == 1 && SF_PREFETCHES) /* decode streams weights once, and the hardware may prefetch too little */
                    __builtin_prefetch(tile + SF_PREFETCH_BYTES, 0, SF_PREFETCH_INTO);
                W w = w_load(tile);
                tile += 64;
                for (int m = 0; m < count; m++)
                    dot[m] = i_dot(dot[m], w, codes[m] + group * SF_ACTIVATION_GROUP + 4 * four);
            }
            for (int m = 0; m < count; m++)
                group_sum[m] = f_fma(f_set1(scales[m][group]), i_float(dot[m]), group_sum[m]);
        }
        F scale = f_load_half(tile_scales);
        tile_scales += SF_TILE_ROWS;
        for (int m = 0; m < count; m++)
            out[m] = f_fma(scale, group_sum[m], out[m]);
    }
}

/* The same for bfloat16 weights: four chains of fused multiply-adds (k mod 4), added as (0 + 1) + (2 + 3). */
SF_INLINE void SF_NAME(bf16_tile)(int count, const uint16_t *tile, long columns, const float *x, long x_stride,
                                  const long *rows, F *out)
{
    F chain[SF_BF16_ROWS][4];
    for (int m = 0; m < count; m++)
        for (int c = 0; c < 4; c++)
            chain[m][c] = f_set1(0.0f);
    for (long k = 0; k < columns; k += 4) {
        F w[4];
        f_load_bf16_pair(tile, &w[0], &w[1]);
        f_load_bf16_pair(tile + 32, &w[2], &w[3]);
        tile += 64;
        for (int m = 0; m < count; m++) {
            const float *row = x + rows[m] * x_stride + k;
            float four[4] = {0};
            if (k + 4 > columns) {
                memcpy(four, row, 4 * (size_t)(columns - k)); /* beyond the last column the weights are zero too */
                row = four;
            }
            for (int c = 0; c < 4; c++)
                chain[m][c] = f_fma(f_set1(row[c]), w[c], chain[m][c]);
        }
    }
    for (int m = 0; m < count; m++)
        out[m] = f_add(f_add(chain[m][0], chain[m][1]), f_add(chain[m][2], chain[m][3]));
}

/* Symmetric int8 codes of one row: per group of 32, scale = amax / 127, code = round(x * (127 / amax)).
 * A NaN or an infinity makes the group's scale NaN, so that it is seen at the logits: codes alone would hide it. */
SF_INLINE void SF_NAME(quantize_row)(const float *x, long columns, const struct sf_quantized *to, long row)
{
    const long groups = to->padded / SF_ACTIVATION_GROUP;
    int8_t *codes = to->codes + row * to->padded;
    for (long group = 0; group < groups; group++) {
        const long start = group * SF_ACTIVATION_GROUP;
        const long here = columns - start;
        F low = here > 0 ? f_load_first(x + start, here < 16 ? (int)here : 16) : f_set1(0.0f);
        F high = here > 16 ? f_load_first(x + start + 16, here < 32 ? (int)here - 16 : 16) : f_set1(0.0f);
        float largest = f_largest(f_max(f_abs(low), f_abs(high)));
        const F zero = f_set1(0.0f);
        const float poison = f_sum(f_fma(low, zero, f_mul(high, zero))); /* 0, or NaN */
        float scale = 0.0f, inverse = 0.0f;
        if (largest >= 1e-30f) { /* below it 127 / largest could overflow */
            scale = largest / 127.0f;
            inverse = 127.0f / largest;
        }
        i_store_int8(codes + start, f_round(f_mul(low, f_set1(inverse))));
        i_store_int8(codes + start + 16, f_round(f_mul(high, f_set1(inverse))));
        int32_t sum = 0;
        for (int k = 0; k < SF_ACTIVATION_GROUP; k++)
            sum += codes[start + k];
        to->scales[row * groups + group] = poison == 0.0f ? scale : poison;
        to->corrections[row * groups + group] = -128 * sum;
    }
}
