/* A step's new tokens: appended to the windows of both sides, and the pages that are full then encoded from there.
 * The bytes are those of quant/codec.py, which uses minima, maxima and elementwise fp32 steps only. A product and a sum
 * must not become one instruction here. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "numbers.h"

#include <math.h>

/* Pages of one side to encode. */
typedef struct {
    Side side; /* window: the tokens to seal */
    int64_t is_keys, heads, page_size;
    int64_t jobs; /* as of Write */
    double clip;
    atomic_int *damaged, *failed; /* of the call */
} Seal;

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

/* Task number job * heads + head seals that page and head of context, a Seal; of each instruction set. */
static const Task seal_tasks[] = BY_ISA(seal_portable_task, seal_avx2_task, seal_avx512_task, seal_avx512_task);

#define APPEND_BYTES 0x20000 /* that one thread copies sooner than another one is woken up */
#define SEAL_NUMBERS 0x1000  /* likewise, that one thread encodes */

typedef struct {
    const Write *a;
    Seal seals[2];
    atomic_int damaged, failed;
} WriteCall;

/* One side's new tokens of one row and head. */
static void append(const Write *a, const Side *side, const New *new, int64_t from, int64_t row, int64_t head) {
    if (!side->dim) return; /* nothing, which has no address */
    int64_t bytes = bytes_of(side->window_dtype), skip = ((const int32_t *)a->skips)[row], start = ((const int32_t *)a->starts)[row];
    int64_t count = a->q_len - skip, token = side->dim * bytes;
    const char *source = (const char *)from + (row * new->row + head * new->head + skip * new->at) * bytes;
    char *to = (char *)side->window + (row * side->window_row + head * side->window_head + start * side->window_slot) * bytes;
    if (new->at == side->dim && side->window_slot == side->dim) {
        memcpy(to, source, count * token);
        return;
    }
    for (int64_t t = 0; t < count; t++) memcpy(to + t * side->window_slot * bytes, source + t * new->at * bytes, token);
}

static void append_task(void *context, int64_t index) {
    const Write *a = ((const WriteCall *)context)->a;
    int64_t row = index / a->heads, head = index % a->heads;
    append(a, &a->keys, &a->new_keys, a->keys_from, row, head);
    append(a, &a->values, &a->new_values, a->values_from, row, head);
}

static void seal_task(void *context, int64_t index) {
    WriteCall *call = context;
    seal_tasks[call->a->isa](&call->seals[index & 1], index >> 1);
}

/* Returns 0 or a number of enum Status. */
static int64_t check(const Write *a) {
    const int32_t *starts = (const int32_t *)a->starts, *skips = (const int32_t *)a->skips, *job = (const int32_t *)a->jobs;
    for (int64_t row = 0; a->keys_from && row < a->rows; row++)
        if (skips[row] < 0 || skips[row] > a->q_len || starts[row] < 0 || starts[row] + a->q_len - skips[row] > a->slots)
            return NO_SUCH_SLOT;
    for (int64_t i = 0; i < a->num_jobs; i++, job += JOB) {
        if (job[2] < 0) continue; /* a place without work */
        if (job[2] >= a->capacity || job[3] >= a->capacity) return NO_SUCH_PAGE;
        int64_t most = job[1] > -1 - job[3] ? job[1] : -1 - (int64_t)job[3]; /* the last slot that a page begins with */
        if (job[0] < 0 || job[0] >= a->rows || job[1] < 0 || most + a->page_size > a->slots) return NO_SUCH_SLOT;
    }
    return 0;
}

/* Returns 0 or a number of enum Status: where there is no such page or slot, nothing was written. */
int64_t kv_hf_write(const Write *a) {
    int64_t status = check(a), pairs = a->rows * a->heads, jobs = a->num_jobs * a->heads;
    if (status) return status;
    WriteCall call = {.a = a};
    int64_t numbers = a->heads * (a->keys.dim + a->values.dim);
    if (a->keys_from) {
        int64_t bytes = a->rows * a->q_len * numbers * bytes_of(a->keys.window_dtype);
        kv_hf_parallel(append_task, &call, pairs, bytes > APPEND_BYTES ? a->threads : 1);
    }
    if (!jobs) return 0;
    atomic_init(&call.damaged, 0);
    atomic_init(&call.failed, 0);
    for (int i = 0; i < 2; i++) {
        const New *new = i ? &a->new_values : &a->new_keys;
        call.seals[i] = (Seal){i ? a->values : a->keys, new->is_keys, a->heads, a->page_size, a->jobs, new->clip, &call.damaged,
                               &call.failed};
    }
    numbers *= a->num_jobs * a->page_size;
    kv_hf_parallel(seal_task, &call, 2 * jobs, numbers > SEAL_NUMBERS ? a->threads : 1);
    if (atomic_load(&call.damaged)) *(uint8_t *)a->damaged = 1;
    return atomic_load(&call.failed) ? NO_MEMORY : 0;
}
