"""Bridges between the pages and transformers' model code; docs/bridge.md says why each exists and what breaks without it."""
