"""Attention over pages through torch's SDPA."""
