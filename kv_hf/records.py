"""Names under which checkpoints say, in config.json, what kv_hf has done to them."""

CONVERSION = "kv_hf_conversion"
UPTRAINING = "kv_hf_uptraining"
