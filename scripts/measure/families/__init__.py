"""Tiny models of every family of the installed transformers, and what paged caches do with them."""
