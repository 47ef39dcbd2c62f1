/* Attention over pages: splits a step into tasks, runs them, merges their softmaxes.
 * The arithmetic is in lanes.inc and attend.inc, compiled once for each instruction set. */
#include "numbers.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORDS 64    /* words of a sum: 256 codes of 8 bits times LARGEST_INTEGER stay below 2^31 */
#define WINDOW_TILE 64  /* exact tokens of a softmax step */
#define ALONE 0x20000   /* multiply-adds that one thread does sooner than others are woken up for them */
#define LARGEST_INTEGER 32767 /* that a coefficient is rounded to */

typedef struct {
    int64_t queries;          /* query heads of a kv head times q_len */
    int64_t row;              /* floats from one query to the next */
    int64_t lanes;            /* floats from one query's scores to the next's, a multiple of 16 */
    int64_t scales, joined;   /* floats of scratch */
} Sizes;

/* Four rows of four floats, which become columns. */
INLINE void transpose4(const float *a, const float *b, const float *c, const float *d, float *to, int64_t row) {
#if X86
    __m128 x[4] = {_mm_loadu_ps(a), _mm_loadu_ps(b), _mm_loadu_ps(c), _mm_loadu_ps(d)};
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    for (int n = 0; n < 4; n++) _mm_storeu_ps(to + n * row, x[n]);
#else
    for (int n = 0; n < 4; n++, to += row) to[0] = a[n], to[1] = b[n], to[2] = c[n], to[3] = d[n];
#endif
}

typedef uint32_t __attribute__((may_alias)) Bits;

/* A sum over words for 4 rows of coefficients at most. */
typedef struct {
    const uint32_t *words; /* the word of r = 0 and lane 0 */
    int64_t num_words, stride; /* stride: lanes of the whole page */
    int64_t next_page;         /* how many words further on the next page lies, which is fetched meanwhile */
    int64_t run;               /* coefficients of one place */
    const Bits *from[4];       /* each row's coefficients: floats, or pairs of integers */
    float step[4], *to[4];
} Sum;

/* Whether codes are summed as integers. */
INLINE int is_integer(int format) { return format == INT8 || format == UINT8 || format == UINT4 || format == UINT2; }

/* Coefficients of a word and place: floats, or pairs of integers. */
INLINE int steps_in_word(int format) { return is_integer(format) ? 2 : codes_in_word(format); }

typedef struct {
    const Decode *a;
    Sizes z;
    int64_t splits, partial_floats, scratch_floats;
    float *partials;
    atomic_int *done, failed;
} Call;

typedef void (*Merge)(const Call *, int64_t row, int64_t head, int64_t splits);

/* The pages of one head lie apart, a few kilobytes each: too short for the processor's own prefetching. Into the second
 * cache: it takes more requests at a time than the nearest one.
 * now: read a word of each line instead, all at once. A processor may drop prefetches of memory whose address it has to look up
 * first; what it dropped is waited for once. */
INLINE void fetch(const void *from, int64_t bytes, int now) {
    for (const char *at = from; at < (const char *)from + bytes; at += 64) {
        if (now)
            (void)*(const volatile char *)at;
        else
            __builtin_prefetch(at, 0, 2);
    }
}

static void fetch_scales(const Side *side, int64_t at, int now) {
    if (side->scale) fetch((const uint16_t *)side->scale + at * side->scale_stride, side->scale_stride * 2, now);
    if (side->offset) fetch((const uint16_t *)side->offset + at * side->offset_stride, side->offset_stride * 2, now);
    if (side->wide) fetch((const uint8_t *)side->order + at * side->order_stride, side->order_stride, now);
}

typedef struct {
    float mass;
    int32_t place;
} Ranked;

/* More mass first, then the first of equals. */
static int by_mass(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->mass != y->mass) return x->mass > y->mass ? -1 : 1;
    return x->place < y->place ? -1 : 1;
}

/* The number of place `at` of x [n] if x were sorted with the largest first; changes the order of x. */
static float nth_largest(float *x, int64_t n, int64_t at) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            float other = x[i];
            x[i++] = x[j], x[j--] = other;
        }
        if (at <= j)
            high = j;
        else if (at >= i)
            low = i;
        else
            break;
    }
    return x[at];
}

/* Mark the `most` pages of most mass, the first of equals. Their masses are at least 0; `rest` has room for as many. */
static void mark_best(const float *mass, int64_t pages, int64_t most, float *rest, uint8_t *marks) {
    memset(marks, 0, pages);
    if (most <= 0) return;
    if (most >= pages) {
        memset(marks, 1, pages);
        return;
    }
    memcpy(rest, mass, pages * sizeof(float));
    float least = nth_largest(rest, pages, most - 1);
    for (int64_t i = 0; i < pages; i++)
        if (mass[i] > least) marks[i] = 1, most--;
    for (int64_t i = 0; i < pages && most > 0; i++)
        if (mass[i] == least) marks[i] = 1, most--;
}

/* Unmark pages beyond those of most mass with which `read` comes to `enough`. */
static void unmark_beyond(const float *mass, int64_t pages, float read, float enough, Ranked *ranked, uint8_t *marks) {
    int64_t count = 0, i = 0;
    for (int64_t page = 0; page < pages; page++)
        if (marks[page]) ranked[count++] = (Ranked){mass[page], (int32_t)page};
    qsort(ranked, count, sizeof(Ranked), by_mass);
    for (; i < count && read < enough; i++) read += ranked[i].mass;
    for (; i < count; i++) marks[ranked[i].place] = 0;
}

#define CHOICE_PAGES 32 /* least pages of a task that estimates what attention finds in them */
#define PREFETCH_PAGES 8 /* pages from the one in work to the one that is fetched */

/* A choice of pages: what is found of each row lies in row_floats floats of call.partials.
 * largest scores and sums of weights [heads, queries, pages + 16], the window behind the pages; masses, ranks and marks [pages]. */
typedef struct {
    Call call;
    const Choose *s;
    int64_t pages, row_floats, per_task;
} Choice;

static int64_t pages_of(const Decode *a, int64_t row) { return ((const int32_t *)a->num_pages)[row]; }

/* Pages that are read at most of a row, where pages of it are chosen: ReadBudget.most */
static int64_t most_pages(const Choose *s, int64_t pages) {
    int64_t most = s->most ? s->most : pages;
    if (s->share != 0 && (int64_t)(s->share * (double)pages) < most) most = (int64_t)(s->share * (double)pages);
    if (most < NEWEST_PAGES) most = NEWEST_PAGES;
    return most < pages ? most : pages;
}

static int is_chosen_from(const Choose *s, int64_t row) {
    const Decode *a = &s->call;
    int64_t pages = pages_of(a, row), tokens = pages * a->page_size + ((const int32_t *)a->exact_lens)[row];
    return pages && tokens >= s->from_tokens && (s->top_p != 0 || most_pages(s, pages) < pages);
}

/* Let a row be read as a whole; 0 where the table of choices has no room for it. */
static int read_all(const Choose *s, int64_t row) {
    const Decode *a = &s->call;
    int64_t pages = pages_of(a, row);
    if (pages > s->width) return 0;
    int32_t *to = (int32_t *)s->table + row * s->width;
    if (s->width) { /* an empty table has no address */
        memcpy(to, (const int32_t *)a->table + row * a->table_width, pages * sizeof(int32_t));
        memset(to + pages, 0, (s->width - pages) * sizeof(int32_t));
    }
    ((int32_t *)s->counts)[row] = (int32_t)pages;
    return 1;
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

static const Task tasks[] = BY_ISA(portable_task, avx2_task, avx512_task, vnni_task);
static const Merge merges[] = BY_ISA(portable_merge, avx2_merge, avx512_merge, vnni_merge);
static const Task choosers[] = BY_ISA(portable_choose_task, avx2_choose_task, avx512_choose_task, vnni_choose_task);

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

/* Words of scratch where the planes of a page and head are put together: `lanes` runs of `codes` codes. */
static int64_t joined_words(const Side *side, int64_t codes, int64_t lanes) {
    int joined = joined_format((int)side->format);
    return joined == (int)side->format ? 0 : words_in(joined, codes) * lanes + 16;
}

/* The sizes of a step's scratch memory. */
static void size_scratch(Call *call) {
    const Decode *a = call->a;
    Sizes *z = &call->z;
    int64_t page = a->page_size;
    z->queries = a->group * a->q_len;
    z->row = (a->keys.dim + 15) / 16 * 16;
    z->lanes = (largest_of(page, WINDOW_TILE) + 15) / 16 * 16;
    z->scales = largest_of(a->keys.dim, a->values.scale ? page * (a->values.dim / a->values.scale_channels) : 0);
    z->joined = largest_of(z->joined, joined_words(&a->keys, a->keys.dim, page));
    z->joined = largest_of(z->joined, joined_words(&a->values, page, a->values.dim));
    call->scratch_floats = (z->queries + 2 * ((z->queries + 3) / 4 * 4)) * z->row + 2 * z->queries + z->queries * z->lanes +
                           3 * z->scales + z->joined + 4 * largest_of(a->keys.dim, page) + 128;
}

/* Returns 0 or a number of enum Status. */
int64_t kv_hf_decode(const Decode *a) {
    Call call = {.a = a};
    Sizes *z = &call.z;
    int64_t page = a->page_size, tokens = 0;
    size_scratch(&call);
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t pages = ((const int32_t *)a->num_pages)[row], exact = ((const int32_t *)a->exact_lens)[row];
        Splits s = splits_of(pages, exact, page, 1);
        call.splits = largest_of(call.splits, s.pages + s.window);
        tokens += pages * page + exact;
    }
    int64_t products = tokens * a->heads * z->queries * (a->keys.dim + a->values.dim);
    call.partial_floats = z->queries * (a->values.dim + 2);
    call.partial_floats += -call.partial_floats & 15;
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

/* Returns 0 or a number of enum Status. */
int64_t kv_hf_choose_pages(const Choose *s) {
    const Decode *a = &s->call;
    Choice choice = {.s = s, .call = {.a = a}};
    Call *call = &choice.call;
    Sizes *z = &call->z;
    z->joined = s->words * a->page_size; /* those that are read of a page, one behind the other */
    size_scratch(call);
    int64_t pages = 0, tokens = 0;
    for (int64_t row = 0; row < a->rows; row++)
        if (is_chosen_from(s, row)) {
            pages = largest_of(pages, pages_of(a, row));
            tokens += pages_of(a, row) * a->page_size;
        } else if (!read_all(s, row)) {
            return NO_SUCH_PAGE;
        }
    if (!pages) return 0;
    choice.pages = (pages + 15) / 16 * 16;
    /* some tasks per thread; what a page gets depends on no other page */
    choice.per_task = largest_of(CHOICE_PAGES, pages * a->rows * a->heads / (4 * largest_of(1, a->threads)));
    call->splits = (pages + choice.per_task - 1) / choice.per_task + 1; /* and the window */
    int64_t queries = a->heads * z->queries;
    choice.row_floats = 2 * queries * (choice.pages + 16) + 4 * choice.pages;
    call->partials = kv_hf_scratch(FOR_CALLS, a->rows * choice.row_floats + a->rows);
    if (!call->partials) return NO_MEMORY;
    call->done = (atomic_int *)(call->partials + a->rows * choice.row_floats);
    atomic_init(&call->failed, 0);
    for (int64_t row = 0; row < a->rows; row++) atomic_init(call->done + row, 0);
    int64_t products = tokens * queries * a->keys.dim / 2;
    kv_hf_parallel(choosers[a->isa], &choice, a->rows * a->heads * call->splits, products > ALONE ? a->threads : 1);
    return atomic_load(&call->failed);
}
