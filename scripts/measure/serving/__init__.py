"""Measuring servers from outside: processes of their own, asked over HTTP."""
