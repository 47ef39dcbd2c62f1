/* What Python and C agree on: argument blocks of 64-bit fields, in this order, and the numbers of formats.
 * backends/cpu/arguments.py packs the blocks; KV_HF_ABI rises whenever a field moves or changes its meaning.
 * A block is packed once per layer. Fields that change from call to call lie together, at the end. */
#ifndef KV_HF_H
#define KV_HF_H

#include <stdint.h>

#define KV_HF_ABI 8

enum Format { F32, BF16, F16, INT8, UINT4, UINT2, FLOAT8, NUM_FORMATS };
enum MaskKind { MASK_NONE, MASK_BOOL, MASK_FLOAT };
enum Isa { ISA_PORTABLE, ISA_AVX2, ISA_AVX512, ISA_VNNI, NUM_ISAS };

/* What a call returns where something is wrong; a decode's output is then not complete. */
enum Status { NO_MEMORY = -1, NO_SUCH_PAGE = -2, NO_SUCH_SLOT = -3 };

/* One side of the pages: codes in layout "lanes" (see spec.SideSpec), scales and offsets in fp16 or fp32. */
typedef struct {
    int64_t format, dim;
    int64_t group_tokens;                    /* tokens that share a scale or an offset */
    int64_t scale_channels;                  /* channels that share a scale */
    int64_t scale_dtype;                     /* of scales and offsets: F16, or F32 for latents */
    int64_t codes_stride, scale_stride, offset_stride; /* words, scales and offsets per page and head */
    int64_t window_dtype;                    /* exact tokens [rows, heads, slots, dim], elements contiguous */
    int64_t window_row, window_head, window_slot; /* strides in elements */
    int64_t codes, scale, offset;            /* pointers to page 0; scale and offset 0 where there are none */
    int64_t window;
} Side;

typedef struct {
    Side keys, values;
    int64_t rows, heads, group, q_len, page_size, sink_tokens;
    int64_t query_dtype, query_row, query_head, query_at;
    int64_t out_row, out_head, out_at; /* of the output, in the query's dtype */
    int64_t sliding_window;            /* or 0 */
    int64_t mask_kind, mask_dtype, mask_row, mask_head, mask_at; /* columns are contiguous */
    int64_t isa;
    double softmax_scale, softcap; /* softcap 0: none */
    int64_t table, table_width, num_pages, exact_lens, padding; /* int32 */
    int64_t capacity;              /* pages that every field of both sides has room for */
    int64_t query, out, mask;
    int64_t sink_logits; /* float [heads * group], or 0 */
    int64_t threads;
} Decode;

typedef struct {
    Side side; /* window: the tokens to seal */
    int64_t is_keys, heads, page_size, jobs, num_jobs;
    int64_t capacity; /* pages that every field has room for */
    int64_t threads, isa;
    double clip;
} Seal;

/* New tokens of one side, [rows, heads, q_len, dim] in the window's dtype; strides in elements. */
typedef struct {
    int64_t is_keys, row, head, at;
    double clip;
} New;

/* Append new tokens to the windows of both sides, then seal pages from the windows. */
typedef struct {
    Side keys, values;
    New new_keys, new_values;
    int64_t rows, heads, q_len, slots, page_size; /* slots: of a row that both windows have */
    int64_t isa;
    int64_t keys_from, values_from;               /* the new tokens; 0: seal alone */
    int64_t starts, skips;                        /* int32 [rows] */
    int64_t jobs, num_jobs;                       /* int32 [num_jobs, 3]: row, first slot, page id */
    int64_t capacity;
    int64_t damaged;                              /* uint8, set to 1 where a number had to be made finite */
    int64_t threads;
} Write;

/* Run task(context, index) for index in [0, tasks) on at most `threads` threads. */
typedef void (*Task)(void *context, int64_t index);
void kv_hf_parallel(Task task, void *context, int64_t tasks, int64_t threads);

/* Memory of the calling thread, kept for its next call and freed when it ends; NULL when memory is short. */
enum Purpose { FOR_CALLS, FOR_TASKS, NUM_PURPOSES };
float *kv_hf_scratch(int purpose, int64_t floats);

#endif
