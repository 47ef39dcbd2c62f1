"""Page bookkeeping and storage: who holds which page, and the tensors that pages live in."""
