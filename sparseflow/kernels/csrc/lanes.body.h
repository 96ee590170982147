/* Sixteen float32 (or int32) lanes, the unit every kernel computes in. Included once per target by each_target.h.
 *
 * Lane = one output row, channel or position, so no float is ever summed across lanes except by f_sum, whose tree is
 * fixed. Each operation is correctly rounded or exact, hence equal in all variants; exp and its kin are built here
 * from those operations instead of taken from libm, whose bits differ from one machine to another.
 */
#if SF_LANES_AVX512
typedef __m512 F;
typedef __m512i I;
SF_INLINE F f_load(const float *p) { return _mm512_loadu_ps(p); }
SF_INLINE void f_store(float *p, F a) { _mm512_storeu_ps(p, a); }
SF_INLINE F f_set1(float x) { return _mm512_set1_ps(x); }
SF_INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
SF_INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
SF_INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
SF_INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
SF_INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }
SF_INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
SF_INLINE F f_abs(F a) { return _mm512_abs_ps(a); }
SF_INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
SF_INLINE I f_round(F a) { return _mm512_cvtps_epi32(a); }
SF_INLINE F i_float(I a) { return _mm512_cvtepi32_ps(a); }
SF_INLINE I i_set1(int32_t x) { return _mm512_set1_epi32(x); }
SF_INLINE F i_power_of_two(I n)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
SF_INLINE void i_store_int8(int8_t *p, I a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
SF_INLINE F f_load_half(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
SF_INLINE void f_store_half(uint16_t *p, F a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SF_INLINE F f_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
SF_INLINE void f_load_bf16_pair(const uint16_t *p, F *even, F *odd)
{
    __m512i pair = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)));
}
#elif SF_LANES_AVX2
typedef struct { __m256 a, b; } F;
typedef struct { __m256i a, b; } I;
SF_INLINE F f_load(const float *p) { return (F){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SF_INLINE void f_store(float *p, F v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
SF_INLINE F f_set1(float x) { return (F){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SF_INLINE F f_add(F x, F y) { return (F){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
SF_INLINE F f_sub(F x, F y) { return (F){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
SF_INLINE F f_mul(F x, F y) { return (F){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
SF_INLINE F f_div(F x, F y) { return (F){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
SF_INLINE F f_max(F x, F y) { return (F){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
SF_INLINE F f_min(F x, F y) { return (F){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
SF_INLINE F f_abs(F x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (F){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
SF_INLINE F f_fma(F x, F y, F z)
{
    return (F){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
SF_INLINE I f_round(F x) { return (I){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
SF_INLINE F i_float(I x) { return (F){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
SF_INLINE I i_set1(int32_t x) { return (I){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SF_INLINE F i_power_of_two(I n)
{
    __m256i bias = _mm256_set1_epi32(127);
    return (F){_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
               _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
SF_INLINE void i_store_int8(int8_t *p, I v)
{
    /* the packs saturate, and what is wanted is the low byte */
    const __m256i byte = _mm256_set1_epi32(0xff);
    __m256i halves = _mm256_packus_epi32(_mm256_and_si256(v.a, byte), _mm256_and_si256(v.b, byte));
    halves = _mm256_permute4x64_epi64(halves, 0xd8); /* packs work within 128 bits: put the four quarters in order */
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
SF_INLINE F f_load_half(const uint16_t *p)
{
    return (F){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
               _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
SF_INLINE void f_store_half(uint16_t *p, F v)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SF_INLINE F f_load_bf16(const uint16_t *p)
{
    __m256i bits = _mm256_loadu_si256((const __m256i *)p);
    __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(bits));
    __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(bits, 1));
    return (F){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
SF_INLINE void f_load_bf16_pair(const uint16_t *p, F *even, F *odd)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 16));
    __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
    *even = (F){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    *odd = (F){_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}
#else
typedef struct { float v[16]; } F;
typedef struct { int32_t v[16]; } I;
#define SF_EACH for (int lane = 0; lane < 16; lane++)
SF_INLINE F f_load(const float *p) { F r; memcpy(r.v, p, 64); return r; }
SF_INLINE void f_store(float *p, F a) { memcpy(p, a.v, 64); }
SF_INLINE F f_set1(float x) { F r; SF_EACH r.v[lane] = x; return r; }
SF_INLINE F f_add(F a, F b) { SF_EACH a.v[lane] += b.v[lane]; return a; }
SF_INLINE F f_sub(F a, F b) { SF_EACH a.v[lane] -= b.v[lane]; return a; }
SF_INLINE F f_mul(F a, F b) { SF_EACH a.v[lane] *= b.v[lane]; return a; }
SF_INLINE F f_div(F a, F b) { SF_EACH a.v[lane] /= b.v[lane]; return a; }
/* the operand order of maxps and minps, so that a NaN ends up the same way */
SF_INLINE F f_max(F a, F b) { SF_EACH a.v[lane] = a.v[lane] > b.v[lane] ? a.v[lane] : b.v[lane]; return a; }
SF_INLINE F f_min(F a, F b) { SF_EACH a.v[lane] = a.v[lane] < b.v[lane] ? a.v[lane] : b.v[lane]; return a; }
SF_INLINE F f_abs(F a) { SF_EACH a.v[lane] = __builtin_fabsf(a.v[lane]); return a; }
SF_INLINE F f_fma(F a, F b, F c) { SF_EACH a.v[lane] = fmaf(a.v[lane], b.v[lane], c.v[lane]); return a; }
/* adding and taking away 1.5 * 2^23 rounds to the nearest even integer; callers stay below 2^22 */
SF_INLINE I f_round(F a)
{
    I r;
    SF_EACH r.v[lane] = (int32_t)((a.v[lane] + 12582912.0f) - 12582912.0f);
    return r;
}
SF_INLINE F i_float(I a) { F r; SF_EACH r.v[lane] = (float)a.v[lane]; return r; }
SF_INLINE I i_set1(int32_t x) { I r; SF_EACH r.v[lane] = x; return r; }
SF_INLINE F i_power_of_two(I n)
{
    F r;
    SF_EACH n.v[lane] = (n.v[lane] + 127) << 23;
    memcpy(r.v, n.v, 64);
    return r;
}
SF_INLINE void i_store_int8(int8_t *p, I a) { SF_EACH p[lane] = (int8_t)a.v[lane]; }
SF_INLINE float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float magnitude;
    if (rest < 0x0400) /* subnormal: an integer times 2^-24 */
        magnitude = (float)rest * 0x1p-24f;
    else {
        bits = rest >= 0x7c00 ? 0x7f800000u | ((rest & 0x3ff) << 13) : (rest << 13) + ((127 - 15) << 23);
        memcpy(&magnitude, &bits, 4);
    }
    memcpy(&bits, &magnitude, 4);
    bits |= sign;
    memcpy(&magnitude, &bits, 4);
    return magnitude;
}
SF_INLINE F f_load_half(const uint16_t *p)
{
    F r;
    SF_EACH r.v[lane] = half_to_float(p[lane]);
    return r;
}
/* nearest even; a NaN stays one */
SF_INLINE uint16_t float_to_half(float x)
{
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) /* 65520: rounds to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* under 2^-14 a half is an integer times 2^-24, as are the floats from 0.5 to 1 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1) - ((127 - 15) << 23);
    return (uint16_t)(sign | bits >> 13);
}
SF_INLINE void f_store_half(uint16_t *p, F a) { SF_EACH p[lane] = float_to_half(a.v[lane]); }
SF_INLINE F f_load_bf16(const uint16_t *p)
{
    F r;
    SF_EACH {
        uint32_t bits = (uint32_t)p[lane] << 16;
        memcpy(&r.v[lane], &bits, 4);
    }
    return r;
}
SF_INLINE void f_load_bf16_pair(const uint16_t *p, F *even, F *odd)
{
    SF_EACH {
        uint32_t low = (uint32_t)p[2 * lane] << 16, high = (uint32_t)p[2 * lane + 1] << 16;
        memcpy(&even->v[lane], &low, 4);
        memcpy(&odd->v[lane], &high, 4);
    }
}
#undef SF_EACH
#endif

/* the first count (1..16) floats, the other lanes zero */
SF_INLINE F f_load_first(const float *p, int count)
{
    float lanes[16] = {0};
    if (count >= 16)
        return f_load(p);
    memcpy(lanes, p, 4 * (size_t)count);
    return f_load(lanes);
}

SF_INLINE void f_store_first(float *p, F a, int count)
{
    float lanes[16];
    if (count >= 16) {
        f_store(p, a);
        return;
    }
    f_store(lanes, a);
    memcpy(p, lanes, 4 * (size_t)count);
}

/* the sum over lanes by halving: 8, 4, 2, 1 */
SF_INLINE float f_sum(F a)
{
    float lanes[16];
    f_store(lanes, a);
    for (int width = 8; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return lanes[0];
}

SF_INLINE float f_largest(F a)
{
    float lanes[16];
    f_store(lanes, a);
    for (int width = 8; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
    return lanes[0];
}

/* exp(x) = 2^n * e^r with |r| <= ln 2 / 2, e^r by its Taylor series to r^7 (remainder 6e-9).
 * Arguments are clamped to [-87, 88], where float32 neither overflows nor leaves the normal range. */
SF_INLINE F f_exp(F x)
{
    x = f_min(f_set1(88.0f), f_max(f_set1(-87.0f), x)); /* in this order a NaN stays one */
    I n = f_round(f_mul(x, f_set1(1.44269504f)));
    F whole = i_float(n);
    F r = f_fma(whole, f_set1(-0.693145752f), x); /* ln 2 in two parts: 0x1.62e4p-1 ... */
    r = f_fma(whole, f_set1(-1.42860677e-6f), r); /* ... and the rest of it */
    F p = f_set1(1.0f / 5040.0f);
    p = f_fma(p, r, f_set1(1.0f / 720.0f));
    p = f_fma(p, r, f_set1(1.0f / 120.0f));
    p = f_fma(p, r, f_set1(1.0f / 24.0f));
    p = f_fma(p, r, f_set1(1.0f / 6.0f));
    p = f_fma(p, r, f_set1(0.5f));
    p = f_fma(p, r, f_set1(1.0f));
    p = f_fma(p, r, f_set1(1.0f));
    return f_mul(p, i_power_of_two(n));
}

SF_INLINE F f_sigmoid(F x)
{
    F one = f_set1(1.0f);
    return f_div(one, f_add(one, f_exp(f_sub(f_set1(0.0f), x))));
}

SF_INLINE F f_silu(F x)
{
    F one = f_set1(1.0f);
    return f_div(x, f_add(one, f_exp(f_sub(f_set1(0.0f), x))));
}

/* softplus(x) = max(x, 0) + log(1 + u), u = exp(-|x|); log(1 + u) = 2 atanh(u / (2 + u)) by its odd series to s^17 */
SF_INLINE F f_softplus(F x)
{
    F zero = f_set1(0.0f), two = f_set1(2.0f);
    F u = f_exp(f_sub(zero, f_abs(x)));
    F s = f_div(u, f_add(two, u));
    F square = f_mul(s, s);
    F p = f_set1(1.0f / 17.0f);
    for (int odd = 15; odd >= 1; odd -= 2)
        p = f_fma(p, square, f_set1(1.0f / (float)odd));
    return f_fma(f_mul(two, s), p, f_max(x, zero));
}
