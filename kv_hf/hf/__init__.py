"""The seam to transformers: registration of names, attention function and generate()."""
