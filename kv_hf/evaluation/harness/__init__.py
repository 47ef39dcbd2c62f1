"""lm-eval (the Language Model Evaluation Harness) over the caches of this package; nothing is imported before it is used."""
