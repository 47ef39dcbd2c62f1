"""The transformers `Cache` over pages: layers, handles and the cache itself."""
