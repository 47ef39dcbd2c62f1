/* A step of attention in splits over tokens: what one covers. merge.inc joins them. */
#ifndef KV_HF_SPLITS_H
#define KV_HF_SPLITS_H

#include "numbers.h"

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

/* A page id that lies outside of the fields would be read (or written) as what lies behind them. */
static inline int is_page(int64_t id, int64_t capacity) { return id >= 0 && id < capacity; }

static inline int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
