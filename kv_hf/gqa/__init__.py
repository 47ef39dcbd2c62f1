"""Fewer kv heads: checkpoints whose key and value heads are merged."""
