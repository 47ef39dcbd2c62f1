"""Caches in files: what a file holds, how it is written, and what is checked before it is read."""
