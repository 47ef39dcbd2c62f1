/* Attention over pages of latents: all heads of absorbed multi-head latent attention read the same tokens, as keys
 * (latent and RoPE key side by side) and as values (the latent). Many multiply-adds per number that is read, so a
 * tile of tokens is written out as floats once, and two products of matrices do the rest.
 * The arithmetic is in latent.inc and rows.inc, compiled once for each instruction set. */
#include "numbers.h"

#include <math.h>

#define TILE 64              /* tokens of a product */
#define TILE_ROWS (2 * TILE) /* tokens that gather before a product, in steps of at most TILE */
#define TILE_LANES (TILE_ROWS + 16) /* an odd number of cache lines: rows do not fall on each other in the cache */
#define BLOCK 64             /* queries of a task */
#define MAX_RANGES 8

/* Of a call, whose keys are latents and values RoPE keys. */
typedef struct {
    int64_t rank, dims; /* floats of a latent, and of it and a RoPE key: multiples of 16 */
    int64_t row;        /* floats from one query or token to the next */
} Latents;

/* Memory that the next tile reads: fetched a few lines at a time while this one is multiplied. */
typedef struct {
    const char *at[MAX_RANGES], *end[MAX_RANGES];
    int64_t ranges, lines; /* lines: of each step */
} Prefetch;

static inline void prefetch_some(Prefetch *prefetch) {
    for (int64_t lines = prefetch->lines; lines && prefetch->ranges;) {
        int64_t r = prefetch->ranges - 1;
        for (; lines && prefetch->at[r] < prefetch->end[r]; lines--, prefetch->at[r] += 64) __builtin_prefetch(prefetch->at[r], 0, 2);
        if (prefetch->at[r] >= prefetch->end[r]) prefetch->ranges--;
    }
}

/* The codes of tokens [from, to) of page number `at`, if a page's codes lay in the order of its tokens. */
static void add_range(Prefetch *prefetch, const Side *side, int64_t page, int64_t at, int64_t from, int64_t to) {
    int64_t bytes = side->codes_stride * 4;
    if (prefetch->ranges == MAX_RANGES || !side->dim) return;
    prefetch->at[prefetch->ranges] = (const char *)side->codes + at * bytes + bytes * from / page;
    prefetch->end[prefetch->ranges++] = (const char *)side->codes + at * bytes + bytes * to / page;
    prefetch->lines += bytes * (to - from) / page / 64 + 2;
}

/* Floats that the scales (or offsets) of a page take, or one of each for every channel. */
static int64_t scales_of(const Side *side, int64_t page) {
    int64_t groups = side->scale ? page / side->group_tokens * (side->dim / side->scale_channels) : 0;
    return largest_of(groups, side->dim + 16) + 16;
}

#if X86
TARGET(AVX2_FEATURES)
#define NAME(x) CAT(latent_avx2_, x)
#define VL 8
#include "latent.inc"
#undef NAME
#undef VL
END_TARGET

TARGET(AVX512_FEATURES)
#define NAME(x) CAT(latent_avx512_, x)
#define VL 16
#include "latent.inc"
#undef NAME
#undef VL
END_TARGET
#endif

#define NAME(x) CAT(latent_portable_, x)
#define VL 4
#include "latent.inc"

static int (*const attends[])(const Call *, const Stretch *, float *, float *) =
    BY_ISA(latent_portable_attend, latent_avx2_attend, latent_avx512_attend, latent_avx512_attend);

/* Returns 0 or a number of enum Status. */
int64_t kv_hf_decode_latent(const Decode *a) {
    Latents z = {.rank = padded(a->keys.dim)};
    z.dims = z.rank + padded(a->values.dim);
    z.row = (z.dims / 16 | 1) * 16; /* as TILE_LANES */
    Call call = {.a = a, .sizes = &z, .queries = a->group * a->q_len, .dim = a->keys.dim, .width = z.rank};
    call.blocks = (call.queries + BLOCK - 1) / BLOCK;
    call.block = ((call.queries + call.blocks - 1) / call.blocks + 3) / 4 * 4;
    call.factor = call.blocks = (call.queries + call.block - 1) / call.block;
    call.scratch_floats = (call.block + TILE_ROWS) * z.row + 2 * call.block * TILE_LANES +
                          2 * (scales_of(&a->keys, a->page_size) + scales_of(&a->values, a->page_size)) + 2 * z.rank + 64;
    call.attend = attends[a->isa];
    return kv_hf_attend(&call);
}
