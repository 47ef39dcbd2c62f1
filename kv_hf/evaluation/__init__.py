"""Accuracy and memory of caches, measured through what they really store."""
