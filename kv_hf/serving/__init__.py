"""Serving many requests: continuous batching on the pages of caches, and transformers' server with them."""
