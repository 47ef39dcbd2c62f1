"""Memory of a model's caches, planned before the model is loaded."""
