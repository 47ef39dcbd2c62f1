"""Bridges between the pages and transformers' model code; docs/design.md says why each exists and what breaks without it."""
