/* Number formats in plain C, and small helpers that the kernels share. */
#ifndef KV_HF_NUMBERS_H
#define KV_HF_NUMBERS_H

#include "kv_hf.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

/* Functions between TARGET(features) and END_TARGET are compiled for these features of x86 processors. */
#define PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#define WIDE ""
#else
#define TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#define WIDE ",prefer-vector-width=512"
#endif
#define AVX2_FEATURES "avx2,fma,f16c"
#define AVX512_FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c" WIDE
#define VNNI_FEATURES "avx512vnni," AVX512_FEATURES

#define INLINE static inline __attribute__((always_inline))
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

INLINE float half_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds to 65536 or more */
    if (bits < 0x38800000) {                      /* below the smallest normal number: let a float sum round */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f; /* spacing 2^-24 */
        memcpy(&bits, &magnitude, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - 0x38000000) >> 13);
}

INLINE uint16_t float_to_bfloat(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float load_float(const void *from, int dtype, int64_t i) {
    if (dtype == F32) return ((const float *)from)[i];
    uint16_t half = ((const uint16_t *)from)[i];
    if (dtype == F16) return half_to_float(half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void store_float(void *to, int dtype, int64_t i, float x) {
    if (dtype == F32)
        ((float *)to)[i] = x;
    else
        ((uint16_t *)to)[i] = dtype == F16 ? float_to_half(x) : float_to_bfloat(x);
}

/* x [dim] -> H x, in runs of `size` channels, a power of two: the sums and differences of quant/codec.py. */
INLINE void hadamard(float *x, int64_t dim, int64_t size) {
    for (int64_t step = 1; step < size; step *= 2)
        for (int64_t first = 0; first < dim; first += 2 * step)
            for (int64_t i = first; i < first + step; i++) {
                float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
}

#define UINT3_MIDDLE 3.5f /* UINT3: the code between its codes that stands for 0 */

/* codes of a byte; of UINT3: of a byte of their low bits */
INLINE int places_of(int format) { return format == UINT4 ? 2 : format == UINT2 || format == UINT3 ? 4 : 1; }

/* Neighbouring codes in a word (codes of other places lie a run further on). */
INLINE int codes_in_word(int format) { return format == F32 ? 1 : format <= F16 ? 2 : 4; }

INLINE int bits_of(int format) {
    static const int bits[NUM_FORMATS] = FORMAT_BITS;
    return bits[format];
}

INLINE int64_t words_in(int format, int64_t codes) { return codes * bits_of(format) / 32; }

/* The code in the middle of a format's codes without a sign; page_summary.middle_code. */
INLINE float middle_code(int format) { return (float)(1u << (bits_of(format) - 1)) - 0.5f; }

#endif
