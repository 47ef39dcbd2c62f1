"""A grid of measurements over models and caches: each cell once, rows as cells finish."""
