/* What the C files share: argument blocks and numbers that Python knows too (abi.h), threads, scratch memory, number formats in
 * plain C, and small helpers. */
#ifndef KV_HF_NUMBERS_H
#define KV_HF_NUMBERS_H

#include "abi.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Run task(context, index) for index in [0, tasks) on at most `threads` threads. */
typedef void (*Task)(void *context, int64_t index);
void kv_hf_parallel(Task task, void *context, int64_t tasks, int64_t threads);

/* Memory of the calling thread, kept for its next call and freed when it ends; NULL when memory is short. */
enum Purpose { FOR_CALLS, FOR_TASKS, NUM_PURPOSES };
float *kv_hf_scratch(int purpose, int64_t floats);

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

/* A table by enum Isa. */
#if X86
#define BY_ISA(portable, avx2, avx512, vnni) {portable, avx2, avx512, vnni}
#else
#define BY_ISA(portable, avx2, avx512, vnni) {portable, portable, portable, portable}
#endif

#define INLINE static inline __attribute__((always_inline))
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

static inline int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smallest_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t numbers) { return (numbers + 15) / 16 * 16; } /* whole vectors of every instruction set */

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

INLINE int64_t bytes_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

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

/* Codes of 3 and 6 bits lie in two planes, one behind the other: their low bits as codes of another format, then the others.
 * Put together they are codes of a third format. */
INLINE int low_plane(int format) { return format == UINT3 ? UINT2 : format == UINT6 ? UINT4 : format; }
INLINE int joined_format(int format) { return format == UINT3 ? UINT4 : format == UINT6 ? UINT8 : format; }

INLINE int has_planes(int format) { return low_plane(format) != format; }

INLINE int is_unsigned(int format) {
    return format == UINT8 || format == UINT6 || format == UINT4 || format == UINT3 || format == UINT2;
}

/* codes of a byte; where there are planes: once they are put together */
INLINE int places_of(int format) { return joined_format(format) == UINT4 ? 2 : format == UINT2 ? 4 : 1; }

/* Words of codes that are put together from one word of each half of the low plane and one of the high plane. */
INLINE int parts_of(int format) { return has_planes(format) ? 4 : 1; }

/* Neighbouring codes in a word (codes of other places lie a run further on). */
INLINE int codes_in_word(int format) { return format == F32 ? 1 : format <= F16 ? 2 : 4; }

INLINE int bits_of(int format) {
    static const int bits[NUM_FORMATS] = FORMAT_BITS;
    return bits[format];
}

INLINE int64_t words_in(int format, int64_t codes) { return codes * bits_of(format) / 32; }

/* Words of codes; where there are planes: of the high plane. */
INLINE int64_t steps_over(int format, int64_t codes) {
    return codes / (codes_in_word(format) * places_of(format) * parts_of(format));
}

/* The largest code of a format without a sign, and the one in the middle, page_summary.middle_codes: 0 where there are no offsets. */
INLINE float top_code(int format) { return (float)((1ll << bits_of(format)) - 1); }
INLINE float middle_code(int format) { return 0.5f * top_code(format); }

#define RUNS (MOST_WIDE + 1)

/* Run number i of a side's channels; the last one holds those that are not wide. */
static inline Run run_of(const Side *side, int i) {
    if (i < MOST_WIDE) return side->wide[i];
    Run rest = {side->format, side->dim};
    for (i = 0; i < MOST_WIDE; i++) rest.channels -= side->wide[i].channels;
    return rest;
}

static inline int64_t pages_of(const Decode *a, int64_t row) { return ((const int32_t *)a->num_pages)[row]; }
static inline int64_t exact_of(const Decode *a, int64_t row) { return ((const int32_t *)a->exact_lens)[row]; }

/* Token `slot` of a row and head of the window. */
static inline const char *window_at(const Side *side, int64_t row, int64_t head, int64_t slot) {
    int64_t from = row * side->window_row + head * side->window_head + slot * side->window_slot;
    return (const char *)side->window + from * bytes_of(side->window_dtype);
}

/* The mask's number for token 0 of a row and query number n, h * q_len + i. */
static inline int64_t mask_from(const Decode *a, int64_t row, int64_t n) {
    int64_t column = ((const int32_t *)a->padding)[row];
    return row * a->mask_row + n / a->q_len * a->mask_head + n % a->q_len * a->mask_at + column;
}

/* -- a step in tasks: a block of a row's queries, and a split of its tokens -- */

/* What a task attends to: pages `first` to `last` of a row, or slots of its window. */
typedef struct {
    int64_t row, block, is_window, first, last;
} Stretch;

/* A task's results are sums [queries, width], of which `dim` count, then the largest score and the total weight of each query. */
typedef struct Call Call;
struct Call {
    const Decode *a;
    const void *sizes;              /* that only `attend` knows */
    int64_t queries, blocks, block; /* of a row; tasks over them, and the queries of one at most */
    int64_t factor;                 /* how many times more tokens than usual a split covers */
    int64_t dim, width;
    int64_t splits, partial_floats, scratch_floats;
    float *partials;
    atomic_int *done, failed;
    int (*attend)(const Call *, const Stretch *, float *partial, float *scratch); /* returns 0 or a number of enum Status */
};

static inline int64_t queries_of(const Call *call, int64_t block) {
    return smallest_of(call->queries - block * call->block, call->block);
}

/* Run the tasks of a call, merge their results, and write them; returns 0 or a number of enum Status. */
int64_t kv_hf_attend(Call *call);

/* A page id that lies outside of the fields would be read (or written) as what lies behind them. */
static inline int is_page(int64_t id, int64_t capacity) { return id >= 0 && id < capacity; }

#endif
