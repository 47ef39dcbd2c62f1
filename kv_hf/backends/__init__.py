"""Attention over pages and the writing of pages: one folder per backend.

base.py says what a backend is, registry.py which of them runs, dispatch.py calls it. Importing compiles nothing and
imports no triton.
"""
