/* A step of attention in splits over tokens: what one covers, and how their softmaxes are merged. */
#ifndef KV_HF_SPLITS_H
#define KV_HF_SPLITS_H

#include "numbers.h"

#include <math.h>

#define WINDOW_SPLIT 256 /* exact tokens of a split */

typedef struct {
    int64_t pages, per_split, window;
} Splits;

/* Splits depend on the row and on the shape of the step alone, so that neither threads nor other rows change a
 * result. `factor`: how many times more tokens than usual a split covers. */
static inline Splits splits_of(int64_t pages, int64_t exact, int64_t page_size, int64_t factor) {
    int64_t tokens = (pages * page_size <= 8192 ? 256 : 1024) * factor;
    int64_t per = tokens > page_size ? tokens / page_size : 1;
    return (Splits){(pages + per - 1) / per, per, (exact + WINDOW_SPLIT * factor - 1) / (WINDOW_SPLIT * factor)};
}

/* Join the splits of `queries` queries of a row, add the sink logits, divide, and write the result. Query n of a row
 * is number n % q_len of head n / q_len.
 * parts: of each split, `stride` floats apart, sums [queries, width] of which `dim` count, then the largest score and
 * the total weight of each query. */
static inline void merge_splits(const Decode *a, int64_t row, int64_t first, int64_t queries, float *parts,
                                int64_t stride, int64_t splits, int64_t dim, int64_t width) {
    for (int64_t n = 0; n < queries; n++) {
        int64_t h = (first + n) / a->q_len, i = (first + n) % a->q_len;
        float best = a->sink_logits ? ((const float *)a->sink_logits)[h] : -INFINITY, total = 0;
        for (int64_t s = 0; s < splits; s++) {
            float top = parts[s * stride + queries * width + n];
            best = top > best ? top : best;
        }
        float shift = best == -INFINITY ? 0 : best;
        if (a->sink_logits) total = expf(((const float *)a->sink_logits)[h] - shift);
        float *out = parts + n * width; /* the first split's place takes the sum */
        if (!splits) memset(out, 0, dim * sizeof(float));
        for (int64_t s = 0; s < splits; s++) {
            const float *part = parts + s * stride;
            float keep = expf(part[queries * width + n] - shift);
            total += keep * part[queries * width + queries + n];
            for (int64_t d = 0; d < dim; d++) out[d] = part[n * width + d] * keep + (s ? out[d] : 0);
        }
        int64_t to = row * a->out_row + h * a->out_head + i * a->out_at;
        float factor = total == 0 ? 0 : 1 / total;
        for (int64_t d = 0; d < dim; d++) store_float((void *)a->out, (int)a->query_dtype, to + d, out[d] * factor);
    }
}

/* A page id that lies outside of the fields would be read (or written) as what lies behind them. */
static inline int is_page(int64_t id, int64_t capacity) { return id >= 0 && id < capacity; }

static inline int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
