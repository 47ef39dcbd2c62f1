/* A step's new tokens: appended to the windows of both sides, and the pages that are full then sealed from there. */
#include "seal.h"
#include "splits.h"

#define APPEND_BYTES 0x20000 /* that one thread copies sooner than another one is woken up */
#define SEAL_NUMBERS 0x1000  /* likewise, that one thread encodes */

typedef struct {
    const Write *a;
    Seal seals[2];
    SealCall calls[2];
} WriteCall;

static int64_t number_bytes(const Side *side) { return side->window_dtype == F32 ? 4 : 2; }

/* One side's new tokens of one row and head. */
static void append(const Write *a, const Side *side, const New *new, int64_t from, int64_t row, int64_t head) {
    int64_t bytes = number_bytes(side), skip = ((const int32_t *)a->skips)[row], start = ((const int32_t *)a->starts)[row];
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
    const Write *a = call->a;
    kv_hf_seal_tasks[a->isa](&call->calls[index & 1], index >> 1);
}

/* Returns 0 or a number of enum Status. */
static int64_t check(const Write *a) {
    const int32_t *starts = (const int32_t *)a->starts, *skips = (const int32_t *)a->skips, *job = (const int32_t *)a->jobs;
    for (int64_t row = 0; a->keys_from && row < a->rows; row++)
        if (skips[row] < 0 || skips[row] > a->q_len || starts[row] < 0 || starts[row] + a->q_len - skips[row] > a->slots)
            return NO_SUCH_SLOT;
    for (int64_t i = 0; i < a->num_jobs; i++, job += 3) {
        if (job[2] < 0) continue; /* a place without work */
        if (job[2] >= a->capacity) return NO_SUCH_PAGE;
        if (job[0] < 0 || job[0] >= a->rows || job[1] < 0 || job[1] + a->page_size > a->slots) return NO_SUCH_SLOT;
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
        int64_t bytes = a->rows * a->q_len * numbers * number_bytes(&a->keys);
        kv_hf_parallel(append_task, &call, pairs, bytes > APPEND_BYTES ? a->threads : 1);
    }
    if (!jobs) return 0;
    for (int i = 0; i < 2; i++) {
        const Side *side = i ? &a->values : &a->keys;
        const New *new = i ? &a->new_values : &a->new_keys;
        call.seals[i] = (Seal){*side, new->is_keys, a->heads, a->page_size, a->jobs, new->clip};
        call.calls[i].a = &call.seals[i];
        call.calls[i].scratch_floats = seal_floats(side, a->page_size);
        atomic_init(&call.calls[i].damaged, 0);
        atomic_init(&call.calls[i].failed, 0);
    }
    numbers *= a->num_jobs * a->page_size;
    kv_hf_parallel(seal_task, &call, 2 * jobs, numbers > SEAL_NUMBERS ? a->threads : 1);
    if (atomic_load(&call.calls[0].damaged) | atomic_load(&call.calls[1].damaged)) *(uint8_t *)a->damaged = 1;
    return atomic_load(&call.calls[0].failed) | atomic_load(&call.calls[1].failed) ? NO_MEMORY : 0;
}
