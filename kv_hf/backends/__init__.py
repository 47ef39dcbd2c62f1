"""Attention over pages and the writing of pages: one folder per backend, which registers itself.

base.py says what a backend is, registry.py which of them runs, dispatch.py calls it. Importing compiles nothing and
imports no triton.
"""

from .base import AttentionCall, Backend
from .cpu import backend as _cpu
from .inputs import PagedKV
from .reference import backend as _reference
from .registry import layout_for, load, register_backend, unregister_backend, why_not
from .sdpa import backend as _sdpa
from .triton import backend as _triton

__all__ = [
    "AttentionCall",
    "Backend",
    "PagedKV",
    "layout_for",
    "load",
    "register_backend",
    "unregister_backend",
    "why_not",
]

for _backend in (_triton, _cpu, _sdpa, _reference):
    _backend.register()
