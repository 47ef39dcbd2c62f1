"""Encoding and decoding of pages in plain torch: the definition of each stored format."""
