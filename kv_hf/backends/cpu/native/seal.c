/* Encoding of full pages: the same bytes as quant/codec.py, which uses minima, maxima and elementwise fp32
 * steps only. A product and a sum must not become one instruction here. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "seal.h"
#include "splits.h"

#include <math.h>

INLINE float round_to_half(float x) { return half_to_float(float_to_half(x)); }

/* e4m3 of |x| <= FLOAT8_TOP, to nearest even; vectors.inc decodes */
INLINE uint32_t float_to_e4m3(float x) {
    const float least = FLOAT8_ROUNDER;
    const int dropped = 23 - FLOAT8_MANTISSA; /* bits of a float's mantissa */
    uint32_t bits, sign, base;
    memcpy(&bits, &x, 4);
    sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    float shifted = magnitude + least;
    uint32_t small;
    memcpy(&small, &shifted, 4);
    memcpy(&base, &least, 4);
    small -= base;
    uint32_t half = (1u << (dropped - 1)) - 1, bias = (uint32_t)(127 - FLOAT8_BIAS) << 23;
    uint32_t normal = (bits + half + (bits >> dropped & 1) - bias) >> dropped;
    return sign | (magnitude < FLOAT8_LEAST_NORMAL ? small : normal);
}

INLINE float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; } /* |x| < 2^22, to nearest even */

#if X86
TARGET(AVX2_FEATURES)
#define NAME(x) CAT(seal_avx2_, x)
#include "seal.inc"
#undef NAME
END_TARGET

TARGET(AVX512_FEATURES)
#define NAME(x) CAT(seal_avx512_, x)
#include "seal.inc"
#undef NAME
END_TARGET
#endif

#define NAME(x) CAT(seal_portable_, x)
#include "seal.inc"

#if X86
const Task kv_hf_seal_tasks[NUM_ISAS] = {seal_portable_task, seal_avx2_task, seal_avx512_task, seal_avx512_task};
#else
const Task kv_hf_seal_tasks[NUM_ISAS] = {seal_portable_task, seal_portable_task, seal_portable_task, seal_portable_task};
#endif
