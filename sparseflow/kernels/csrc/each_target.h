/* Compiles SF_BODY once per instruction set.
 *
 * A kernel header defines SF_BODY (a quoted file name) and includes this file once. The body is then compiled as
 * name_generic, name_avx2 and name_avx512vnni, each under its own target attributes, so one binary carries all of
 * them and no -m flag is needed. SF_NAME(name) spells the variant's name; lanes.body.h gives the 16-lane arithmetic.
 * Every body computes in the same order with the same fused multiply-adds: the variants give equal bits.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SF_INLINE static inline __attribute__((always_inline))

/* within a body the 16-lane types and operations go by their bare names */
#define F SF_NAME(sf_f)
#define I SF_NAME(sf_i)
#define f_load SF_NAME(f_load)
#define f_store SF_NAME(f_store)
#define f_set1 SF_NAME(f_set1)
#define f_add SF_NAME(f_add)
#define f_sub SF_NAME(f_sub)
#define f_mul SF_NAME(f_mul)
#define f_div SF_NAME(f_div)
#define f_max SF_NAME(f_max)
#define f_min SF_NAME(f_min)
#define f_abs SF_NAME(f_abs)
#define f_fma SF_NAME(f_fma)
#define f_round SF_NAME(f_round)
#define i_float SF_NAME(i_float)
#define i_set1 SF_NAME(i_set1)
#define i_power_of_two SF_NAME(i_power_of_two)
#define i_store_int8 SF_NAME(i_store_int8)
#define f_load_half SF_NAME(f_load_half)
#define f_store_half SF_NAME(f_store_half)
#define f_load_bf16 SF_NAME(f_load_bf16)
#define f_load_bf16_pair SF_NAME(f_load_bf16_pair)
#define half_to_float SF_NAME(half_to_float)
#define float_to_half SF_NAME(float_to_half)
#define f_load_first SF_NAME(f_load_first)
#define f_store_first SF_NAME(f_store_first)
#define f_sum SF_NAME(f_sum)
#define f_largest SF_NAME(f_largest)
#define f_exp SF_NAME(f_exp)
#define f_sigmoid SF_NAME(f_sigmoid)
#define f_silu SF_NAME(f_silu)
#define f_softplus SF_NAME(f_softplus)

#define SF_LANES_GENERIC 1
#define SF_NAME(name) name##_generic
#include "lanes.body.h"
#include SF_BODY
#undef SF_NAME
#undef SF_LANES_GENERIC

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define SF_LANES_AVX2 1
#define SF_NAME(name) name##_avx2
#include "lanes.body.h"
#include SF_BODY
#undef SF_NAME
#undef SF_LANES_AVX2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define SF_LANES_AVX512 1
#define SF_NAME(name) name##_avx512vnni
#include "lanes.body.h"
#include SF_BODY
#undef SF_NAME
#undef SF_LANES_AVX512
#pragma GCC pop_options

/* a kernel's variants in the order of isa.NAMES */
#define SF_TABLE(name) {name##_generic, name##_avx2, name##_avx512vnni}
#else
#define SF_TABLE(name) {name##_generic, name##_generic, name##_generic}
#endif

#undef F
#undef I
#undef f_load
#undef f_store
#undef f_set1
#undef f_add
#undef f_sub
#undef f_mul
#undef f_div
#undef f_max
#undef f_min
#undef f_abs
#undef f_fma
#undef f_round
#undef i_float
#undef i_set1
#undef i_power_of_two
#undef i_store_int8
#undef f_load_half
#undef f_store_half
#undef f_load_bf16
#undef f_load_bf16_pair
#undef half_to_float
#undef float_to_half
#undef f_load_first
#undef f_store_first
#undef f_sum
#undef f_largest
#undef f_exp
#undef f_sigmoid
#undef f_silu
#undef f_softplus
