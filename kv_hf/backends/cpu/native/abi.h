/* All that C and Python agree on. abi.py beside this folder repeats names, orders and numbers: tests/backends/test_cpu_abi.py
 * compares them, and says the number that KV_HF_ABI has to have once something changes here.
 * A block is packed once per layer. Fields that change from call to call lie together, at the end. */
#ifndef KV_HF_ABI_H
#define KV_HF_ABI_H

#include <stdint.h>

/* of a library that was built from these declarations, and no others */
#define KV_HF_ABI 1667980019

enum Format { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, UINT4 = 4, UINT2 = 5, FLOAT8 = 6, UINT8 = 7, UINT3 = 8, UINT6 = 9, NUM_FORMATS = 10 };

#define FORMAT_BITS {32, 16, 16, 8, 4, 2, 8, 8, 3, 6} /* of a code, by enum Format */
#define SCALE_MAX 65504.0f /* largest scale, offset and number: that of fp16 */
#define SIGNED_TOP 127.0f /* largest code of INT8 */
/* FLOAT8: its largest number, bits of its mantissa, and the bias of its exponent */
#define FLOAT8_TOP 448.0f
#define FLOAT8_MANTISSA 3
#define FLOAT8_BIAS 7
#define FLOAT8_LEAST_NORMAL 0x1p-6f
/* what FLOAT8's bits, moved into a float, fall short of the number by */
#define FLOAT8_LIFT 0x1p120f
/* the float whose spacing is FLOAT8's smallest number: adding it rounds to multiples of that */
#define FLOAT8_ROUNDER 0x1p14f
/* of page_summary.py and read_budget.py */
#define MOST_CHANNELS 1024 /* of a head that is read in part */
#define MOST_WORDS 256 /* that are read of a token's codes */
#define RANGED_PAGES 8
#define MIDDLE_TOKENS 4
#define NEWEST_PAGES 1
#define JOB 4 /* numbers of a page to seal */
#define MOST_WIDE 2 /* widths of codes in front of those of the other channels */

enum MaskKind { MASK_NONE = 0, MASK_BOOL = 1, MASK_FLOAT = 2 };

enum Summary { ALL_CHANNELS = 0, SCALES = 1, OFFSETS = 2, TOKENS = 3, ORDER = 4 };

enum Isa { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2, ISA_VNNI = 3, NUM_ISAS = 4 };

/* What a call returns where something is wrong; a decode's output is then not complete. */
enum Status { NO_MEMORY = -1, NO_SUCH_PAGE = -2, NO_SUCH_SLOT = -3 };

/* Channels whose codes lie together. */
typedef struct {
    int64_t format, channels;
} Run;
_Static_assert(sizeof(Run) == 16, "fields of 64 bits");

/* One side of the pages: codes in layout "lanes" (see spec.SideSpec), scales and offsets in fp16 or fp32. */
typedef struct {
    int64_t format, dim;
    int64_t rotated; /* channels that a Hadamard transform takes together (see quant/codec.py), or 0 */
    Run wide[MOST_WIDE]; /* in front of the others, of their page's order, the widest first; without channels: none */
    int64_t group_tokens; /* tokens that share a scale or an offset */
    int64_t scale_channels; /* channels that share a scale */
    int64_t scale_dtype; /* of scales and offsets: F16, or F32 for latents */
    int64_t codes_stride, scale_stride, offset_stride; /* words, scales and offsets per page and head */
    int64_t window_dtype; /* exact tokens [rows, heads, slots, dim], elements contiguous */
    int64_t window_row, window_head, window_slot; /* strides in elements */
    int64_t codes, scale, offset; /* pointers to page 0; scale and offset 0 where there are none */
    int64_t order, order_stride; /* place -> channel, uint8 per page and head, where there are wide channels */
    int64_t window; /* pointer to the exact tokens */
} Side;
_Static_assert(sizeof(Side) == 184, "fields of 64 bits");

/* Attention of the newest tokens. */
typedef struct {
    Side keys, values;
    int64_t rows, heads, group, q_len, page_size, sink_tokens;
    int64_t query_dtype, query_row, query_head, query_at;
    int64_t out_row, out_head, out_at; /* of the output, in the query's dtype */
    int64_t sliding_window; /* or 0 */
    int64_t mask_kind, mask_dtype, mask_row, mask_head, mask_at; /* columns are contiguous */
    int64_t isa;
    double softmax_scale, softcap; /* softcap 0: none */
    int64_t table; /* int32 [rows, at least a row's pages] */
    int64_t table_width; /* entries from one row to the next */
    int64_t num_pages, exact_lens, padding; /* int32 [rows] */
    int64_t capacity; /* pages that every field of both sides has room for */
    int64_t query, out, mask;
    int64_t sink_logits; /* float [heads * group], or 0 */
    int64_t threads;
} Decode;
_Static_assert(sizeof(Decode) == 632, "fields of 64 bits");

/* New tokens of one side, [rows, heads, q_len, dim] in the window's dtype; strides in elements. */
typedef struct {
    int64_t is_keys, row, head, at;
    double clip;
} New;
_Static_assert(sizeof(New) == 40, "fields of 64 bits");

/* Append new tokens to the windows of both sides, then seal pages from the windows. */
typedef struct {
    Side keys, values;
    New new_keys, new_values;
    int64_t rows, heads, q_len, slots, page_size; /* slots: of a row that both windows have */
    int64_t isa;
    int64_t keys_from, values_from; /* the new tokens; 0: seal alone */
    int64_t starts, skips; /* int32 [rows] */
    int64_t jobs, num_jobs; /* int32 [num_jobs, JOB]: row, first slot, page id, whose order of channels: see PageWrite.jobs */
    int64_t capacity;
    int64_t damaged; /* uint8, set to 1 where a number had to be made finite */
    int64_t threads;
} Write;
_Static_assert(sizeof(Write) == 568, "fields of 64 bits");

/* The choice of the pages that a step reads; no values, mask or sliding window. */
typedef struct {
    Decode call;
    int64_t summary; /* of the keys: enum Summary */
    int64_t words; /* of a token's codes that are read, ALL_CHANNELS and ORDER apart */
    int64_t turn; /* words from one to the one that RoPE turns with it, counted round; 0: none */
    int64_t most; /* pages that are read of a row; 0: no bound */
    int64_t from_tokens; /* tokens of a row from which on pages are chosen */
    double share; /* or 0 */
    int64_t held; /* int32 [heads, words]: the words of a token's codes that are there, the keys being an index; 0: all */
    int64_t middles; /* of the channels of an index of exact keys, [pages, heads, dim] in the window's dtype, or 0 */
    int64_t table, width; /* int32 [rows, width], written */
    int64_t counts; /* int32 [rows], written */
} Choose;
_Static_assert(sizeof(Choose) == 720, "fields of 64 bits");

#endif
