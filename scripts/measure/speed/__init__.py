"""Speed: caches side by side, each gated by its results before it is timed."""
