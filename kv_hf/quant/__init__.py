"""Encoding and decoding of pages in plain torch: formats applied to pages, and where codes lie in them."""
