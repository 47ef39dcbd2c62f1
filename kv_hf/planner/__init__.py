"""What a model's cache will take, before the model is loaded."""
