/* Attention over pages: splits a step into tasks, runs them, merges their softmaxes.
 * The arithmetic is in lanes.inc and attend.inc, compiled once for each instruction set. */
#include "numbers.h"

#include <math.h>

#define MAX_WORDS 64    /* words of a sum: 256 codes of 8 bits times LARGEST_INTEGER stay below 2^31 */
#define WINDOW_TILE 64  /* exact tokens of a softmax step */
#define ALONE 0x20000   /* multiply-adds that one thread does sooner than others are woken up for them */
#define LARGEST_INTEGER 32767 /* that a coefficient is rounded to */

typedef struct {
    int64_t queries;          /* query heads of a kv head times q_len */
    int64_t row;              /* floats from one query to the next */
    int64_t lanes;            /* floats from one query's scores to the next's, a multiple of 16 */
    int64_t scales, taken;    /* floats of scratch */
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
    int64_t half;          /* words from one half of a low plane to the next, and on to the high plane */
    int64_t num_words, stride; /* stride: lanes of the whole page */
    int64_t next_page;         /* how many words further on the next page lies, which is fetched meanwhile */
    int64_t run;               /* coefficients of one place */
    const Bits *from[4];       /* each row's coefficients: floats, or pairs of integers */
    float step[4], *to[4];
} Sum;

/* Whether codes are summed as integers. */
INLINE int is_integer(int format) { return format == INT8 || is_unsigned(format); }

/* Coefficients of a word and place: floats, or pairs of integers. */
INLINE int steps_in_word(int format) { return is_integer(format) ? 2 : codes_in_word(format); }

typedef void (*Merge)(const Call *, int64_t row, int64_t block, int64_t splits);

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
    if (side->order) fetch((const uint8_t *)side->order + at * side->order_stride, side->order_stride, now);
}

typedef struct {
    float mass;
    int32_t place;
} Ranked;

/* More mass first, then the first of equals. */
static int is_before(const Ranked *x, const Ranked *y) {
    return x->mass != y->mass ? x->mass > y->mass : x->place < y->place;
}

/* Bring the `most` of most mass to the front of x [n]. */
static void best_first(Ranked *x, int64_t n, int64_t most) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        Ranked pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (is_before(x + i, &pivot)) i++;
            while (is_before(&pivot, x + j)) j--;
            if (i > j) break;
            Ranked other = x[i];
            x[i++] = x[j], x[j--] = other;
        }
        if (most - 1 <= j)
            high = j;
        else if (most - 1 >= i)
            low = i;
        else
            break;
    }
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

/* Pages that are read at most of a row, where pages of it are chosen: ReadBudget.most */
static int64_t most_pages(const Choose *s, int64_t pages) {
    int64_t most = s->most ? s->most : pages;
    if (s->share != 0 && (int64_t)(s->share * (double)pages) < most) most = (int64_t)(s->share * (double)pages);
    if (most < NEWEST_PAGES) most = NEWEST_PAGES;
    return most < pages ? most : pages;
}

static int is_chosen_from(const Choose *s, int64_t row) {
    const Decode *a = &s->call;
    int64_t pages = pages_of(a, row), tokens = pages * a->page_size + exact_of(a, row);
    return pages && tokens >= s->from_tokens && most_pages(s, pages) < pages;
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

/* Bytes from one token of the window to the next. */
static int64_t window_stride(const Side *side) { return side->window_slot * bytes_of(side->window_dtype); }

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

static int (*const attends[])(const Call *, const Stretch *, float *, float *) =
    BY_ISA(portable_attend, avx2_attend, avx512_attend, vnni_attend);
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

/* The sizes of scratch memory; taken: words of a page that a choice reads. Returns the floats of all. */
static int64_t size_scratch(const Decode *a, Sizes *z, int64_t taken) {
    int64_t page = a->page_size;
    z->queries = a->group * a->q_len;
    z->row = padded(a->keys.dim);
    z->lanes = padded(largest_of(page, WINDOW_TILE));
    z->scales = largest_of(a->keys.dim, a->values.scale ? page * (a->values.dim / a->values.scale_channels) : 0);
    z->taken = taken;
    return 2 * z->queries * z->row + 2 * z->queries + z->queries * z->lanes + 3 * z->scales +
           z->taken + 4 * (largest_of(a->keys.dim, page) + 16 * RUNS) + 64;
}

/* Room for results of so many floats, and for `count` numbers of tasks that are done; 0 where memory is short. */
static int make_room(Call *call, int64_t floats, int64_t count) {
    call->partials = kv_hf_scratch(FOR_CALLS, floats + count);
    if (!call->partials) return 0;
    call->done = (atomic_int *)(call->partials + floats);
    atomic_init(&call->failed, 0);
    for (int64_t i = 0; i < count; i++) atomic_init(call->done + i, 0);
    return 1;
}

#define WINDOW_SPLIT 256 /* exact tokens of a split */

typedef struct {
    int64_t pages, per_split, window;
} Splits;

/* Splits depend on the row and on the shape of the step alone, so that neither threads nor other rows change a result. */
static Splits splits_of(const Call *call, int64_t row) {
    int64_t pages = pages_of(call->a, row), page_size = call->a->page_size, window = WINDOW_SPLIT * call->factor;
    int64_t tokens = (pages * page_size <= 8192 ? 256 : 1024) * call->factor, per = largest_of(tokens / page_size, 1);
    return (Splits){(pages + per - 1) / per, per, (exact_of(call->a, row) + window - 1) / window};
}

static void attend_task(void *context, int64_t index) {
    Call *call = context;
    const Decode *a = call->a;
    int64_t split = index % call->splits, pair = index / call->splits, row = pair / call->blocks;
    Splits s = splits_of(call, row);
    int64_t window = split - s.pages;
    if (window >= s.window) return;
    Stretch to = {.row = row, .block = pair % call->blocks, .is_window = window >= 0};
    int64_t per = to.is_window ? WINDOW_SPLIT * call->factor : s.per_split;
    to.first = (to.is_window ? window : split) * per;
    to.last = smallest_of(to.first + per, to.is_window ? exact_of(a, row) : pages_of(a, row));
    float *scratch = kv_hf_scratch(FOR_TASKS, call->scratch_floats);
    int status = scratch ? call->attend(call, &to, call->partials + index * call->partial_floats, scratch) : NO_MEMORY;
    if (status) atomic_store(&call->failed, status);
    if (!scratch) return;
    if (atomic_fetch_add(call->done + pair, 1) + 1 == s.pages + s.window) merges[a->isa](call, row, to.block, s.pages + s.window);
}

int64_t kv_hf_attend(Call *call) {
    const Decode *a = call->a;
    int64_t tokens = 0, pairs = a->rows * call->blocks;
    call->splits = 1;
    for (int64_t row = 0; row < a->rows; row++) {
        Splits s = splits_of(call, row);
        call->splits = largest_of(call->splits, s.pages + s.window);
        tokens += pages_of(a, row) * a->page_size + exact_of(a, row);
    }
    call->partial_floats = padded(call->block * (call->width + 2));
    if (!make_room(call, pairs * call->splits * call->partial_floats, pairs)) return NO_MEMORY;
    for (int64_t row = 0; row < a->rows; row++) /* rows without any token have no task that could write */
        for (int64_t block = 0; pages_of(a, row) + exact_of(a, row) == 0 && block < call->blocks; block++)
            merges[a->isa](call, row, block, 0);
    int64_t products = tokens * call->queries * (a->keys.dim + a->values.dim);
    kv_hf_parallel(attend_task, call, pairs * call->splits, products > ALONE ? a->threads : 1);
    return atomic_load(&call->failed);
}

/* Returns 0 or a number of enum Status. */
int64_t kv_hf_decode(const Decode *a) {
    Sizes z;
    Call call = {.a = a, .sizes = &z, .blocks = a->heads, .factor = 1, .dim = a->values.dim, .width = a->values.dim};
    call.scratch_floats = size_scratch(a, &z, 0);
    call.block = z.queries, call.queries = a->heads * z.queries;
    call.attend = attends[a->isa];
    return kv_hf_attend(&call);
}

/* Returns 0 or a number of enum Status. */
int64_t kv_hf_choose_pages(const Choose *s) {
    const Decode *a = &s->call;
    Sizes z;
    Choice choice = {.s = s, .call = {.a = a, .sizes = &z}};
    Call *call = &choice.call;
    call->scratch_floats = size_scratch(a, &z, s->words * a->page_size);
    call->block = z.queries, call->queries = a->heads * z.queries;
    int64_t pages = 0, tokens = 0;
    for (int64_t row = 0; row < a->rows; row++)
        if (is_chosen_from(s, row)) {
            pages = largest_of(pages, pages_of(a, row));
            tokens += pages_of(a, row) * a->page_size;
        } else if (!read_all(s, row)) {
            return NO_SUCH_PAGE;
        }
    if (!pages) return 0;
    choice.pages = padded(pages);
    /* some tasks per thread; what a page gets depends on no other page */
    choice.per_task = largest_of(CHOICE_PAGES, pages * a->rows * a->heads / (4 * largest_of(1, a->threads)));
    call->splits = (pages + choice.per_task - 1) / choice.per_task + 1; /* and the window */
    choice.row_floats = 2 * call->queries * (choice.pages + 16) + 4 * choice.pages;
    if (!make_room(call, a->rows * choice.row_floats, a->rows)) return NO_MEMORY;
    int64_t products = tokens * call->queries * a->keys.dim / 2;
    kv_hf_parallel(choosers[a->isa], &choice, a->rows * a->heads * call->splits, products > ALONE ? a->threads : 1);
    return atomic_load(&call->failed);
}
