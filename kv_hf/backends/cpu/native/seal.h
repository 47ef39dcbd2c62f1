/* Sealing of single pages and heads, as tasks. */
#ifndef KV_HF_SEAL_H
#define KV_HF_SEAL_H

#include "kv_hf.h"

#include <stdatomic.h>

/* Pages of one side to encode. */
typedef struct {
    Side side; /* window: the tokens to seal */
    int64_t is_keys, heads, page_size;
    int64_t jobs; /* int32 [.., 3]: row, first slot, page id */
    double clip;
} Seal;

typedef struct {
    const Seal *a;
    int64_t scratch_floats;
    atomic_int damaged, failed;
} SealCall;

/* Task number job * heads + head seals that page and head of context, a SealCall; of each instruction set. */
extern const Task kv_hf_seal_tasks[NUM_ISAS];

static inline int64_t seal_floats(const Side *side, int64_t page) {
    return 2 * page * side->dim + 4 * side->dim + 4 * page;
}

#endif
