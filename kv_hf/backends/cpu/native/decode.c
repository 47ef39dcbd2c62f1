/* Attention over pages: splits a step into tasks, runs them, merges their softmaxes.
 * The arithmetic is in lanes.inc and attend.inc, compiled once for each instruction set. */
#include "splits.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORDS 256   /* words of a padded stretch of lanes at a time */
#define WINDOW_TILE 64  /* exact tokens of a softmax step */
#define ALONE 0x20000   /* multiply-adds that one thread does sooner than others are woken up for them */
#define LARGEST_INTEGER 32639 /* that integers.inc rounds a coefficient to: 127 * 256 + 127 */

typedef struct {
    int64_t queries;          /* query heads of a kv head times q_len */
    int64_t row;              /* floats from one query to the next */
    int64_t lanes;            /* floats from one query's scores to the next's, a multiple of 16 */
    int64_t weights, scales, joined; /* floats of scratch */
    int integers;             /* 16-bit queries: sums over codes may use integers */
    int8_t *bytes;
} Sizes;

typedef struct {
    const Decode *a;
    Sizes z;
    int64_t splits, partial_floats, scratch_floats;
    float *partials;
    atomic_int *done, failed;
} Call;

typedef void (*Merge)(const Call *, int64_t row, int64_t head, int64_t splits);

/* The pages of one head lie apart, a few kilobytes each: too short for the processor's own prefetching. Into the second
 * cache: it takes more requests at a time than the nearest one. */
static void fetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

static void fetch_scales(const Side *side, int64_t at) {
    if (side->scale) fetch((const uint16_t *)side->scale + at * side->scale_stride, side->scale_stride * 2);
    if (side->offset) fetch((const uint16_t *)side->offset + at * side->offset_stride, side->offset_stride * 2);
    if (side->wide) fetch((const uint8_t *)side->order + at * side->order_stride, side->order_stride);
}

/* Token `slot` of a row and head of the window. */
static const char *window_at(const Side *side, int64_t row, int64_t head, int64_t slot) {
    int64_t from = row * side->window_row + head * side->window_head + slot * side->window_slot;
    return (const char *)side->window + from * (side->window_dtype == F32 ? 4 : 2);
}

/* Bytes from one token of the window to the next. */
static int64_t window_stride(const Side *side) { return side->window_slot * (side->window_dtype == F32 ? 4 : 2); }

#define VNNI 0
#if X86
TARGET(AVX2_FEATURES)
#define NAME(x) CAT(avx2_, x)
#define VL 8
#include "lanes.inc"
#undef NAME
#undef VL
END_TARGET

TARGET(AVX512_FEATURES)
#define NAME(x) CAT(avx512_, x)
#define VL 16
#include "lanes.inc"
#undef NAME
#undef VNNI
END_TARGET

TARGET(VNNI_FEATURES)
#define NAME(x) CAT(vnni_, x)
#define VNNI 1
#include "integers.inc"
#include "lanes.inc"
#undef NAME
#undef VL
#undef VNNI
END_TARGET
#define VNNI 0
#endif

#define NAME(x) CAT(portable_, x)
#define VL 4
#include "lanes.inc"

#if X86
static const Task tasks[NUM_ISAS] = {portable_task, avx2_task, avx512_task, vnni_task};
static const Merge merges[NUM_ISAS] = {portable_merge, avx2_merge, avx512_merge, vnni_merge};
#else
static const Task tasks[NUM_ISAS] = {portable_task, portable_task, portable_task, portable_task};
static const Merge merges[NUM_ISAS] = {portable_merge, portable_merge, portable_merge, portable_merge};
#endif

/* The best instruction set of this processor, as a number of enum Isa. */
int64_t kv_hf_isa(void) {
#if X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return __builtin_cpu_supports("avx512vnni") ? ISA_VNNI : ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return ISA_AVX2;
#endif
    return ISA_PORTABLE;
}

int64_t kv_hf_abi(void) { return KV_HF_ABI; }

/* Returns 0 or a number of enum Status. */
int64_t kv_hf_decode(const Decode *a) {
    Call call = {.a = a};
    Sizes *z = &call.z;
    int64_t page = a->page_size;
    z->queries = a->group * a->q_len;
    z->row = (a->keys.dim + 15) / 16 * 16;
    z->lanes = (largest_of(page, WINDOW_TILE) + 15) / 16 * 16;
    z->weights = largest_of(z->queries * z->lanes, 2 * page); /* also where scales change places */
    z->scales = largest_of(a->keys.dim, a->values.scale ? page * (a->values.dim / a->values.scale_channels) : 0);
    if (a->values.format == UINT3) z->joined = words_in(UINT4, page) * a->values.dim + 16;
    z->integers = a->query_dtype != F32;
    int64_t tokens = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t pages = ((const int32_t *)a->num_pages)[row], exact = ((const int32_t *)a->exact_lens)[row];
        Splits s = splits_of(pages, exact, page, 1);
        call.splits = largest_of(call.splits, s.pages + s.window);
        tokens += pages * page + exact;
    }
    int64_t products = tokens * a->heads * z->queries * (a->keys.dim + a->values.dim);
    call.partial_floats = z->queries * (a->values.dim + 2);
    call.partial_floats += -call.partial_floats & 15;
    call.scratch_floats = 3 * z->queries * z->row + z->queries + z->queries * z->lanes + z->weights + 3 * z->scales + z->joined +
                          2 * largest_of(a->keys.dim, page) + 64;
    int64_t pairs = a->rows * a->heads;
    call.splits = largest_of(call.splits, 1);
    call.partials = kv_hf_scratch(FOR_CALLS, pairs * call.splits * call.partial_floats + pairs);
    if (!call.partials) return NO_MEMORY;
    call.done = (atomic_int *)(call.partials + pairs * call.splits * call.partial_floats);
    atomic_init(&call.failed, 0);
    for (int64_t i = 0; i < pairs; i++) atomic_init(call.done + i, 0);
    for (int64_t row = 0; row < a->rows; row++) /* rows without any token have no task that could write */
        if (((const int32_t *)a->num_pages)[row] + ((const int32_t *)a->exact_lens)[row] == 0)
            for (int64_t head = 0; head < a->heads; head++) merges[a->isa](&call, row, head, 0);
    kv_hf_parallel(tasks[a->isa], &call, pairs * call.splits, products > ALONE ? a->threads : 1);
    return atomic_load(&call.failed);
}
