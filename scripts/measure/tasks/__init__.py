"""Task files for lm-eval over data that comes in PyPI packages."""
