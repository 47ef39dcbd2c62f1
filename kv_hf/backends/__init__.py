"""Attention over pages and the writing of pages: one folder per backend.

base.py says what a backend is, dispatch.py which of them runs, and calls it. Importing compiles nothing and
imports no triton.
"""
