"""Attention over pages. `ops` chooses an implementation, `reference` is the definition of the result."""
