/* What the C files share: the argument blocks and numbers that Python knows too (abi.h), threads and scratch memory. */
#ifndef KV_HF_H
#define KV_HF_H

#include "abi.h"

/* Run task(context, index) for index in [0, tasks) on at most `threads` threads. */
typedef void (*Task)(void *context, int64_t index);
void kv_hf_parallel(Task task, void *context, int64_t tasks, int64_t threads);

/* Memory of the calling thread, kept for its next call and freed when it ends; NULL when memory is short. */
enum Purpose { FOR_CALLS, FOR_TASKS, NUM_PURPOSES };
float *kv_hf_scratch(int purpose, int64_t floats);

#endif
