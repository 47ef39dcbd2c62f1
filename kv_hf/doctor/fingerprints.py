"""Fingerprints of the seams in the tested versions; scripts/seam_fingerprints.py writes this file."""

KNOWN: dict[str, dict[str, str]] = {
    "generation.configuration_utils:GenerationConfig.validate": {
        "5.17.0": "ffc6be65c930daf4",
        "5.23.0": "ffc6be65c930daf4",
    },
    "generation.utils:GenerationMixin._prepare_cache_for_generation": {
        "5.17.0": "28809b45b2865009",
        "5.23.0": "737b2a25facfce8f",
    },
    "generation.utils:GenerationMixin._prefill": {
        "5.17.0": "ebc6546201d5e40b",
        "5.23.0": "eba43b0ea9d48213",
    },
    "generation.utils:GenerationMixin._valid_auto_compile_criteria": {
        "5.17.0": "275b693ba315a35b",
        "5.23.0": "275b693ba315a35b",
    },
    "modeling_utils:PreTrainedModel.get_compiled_call": {
        "5.17.0": "9b60eed59f77fd3b",
        "5.23.0": "9b60eed59f77fd3b",
    },
    "modeling_utils:PreTrainedModel.get_correct_attn_implementation": {
        "5.17.0": "856b643845bf3329",
        "5.23.0": "fccaf49a89656f5c",
    },
    "masking_utils:sdpa_mask": {
        "5.17.0": "470af6fcc68e5013",
        "5.23.0": "29f7c0653fd35aca",
    },
    "masking_utils:_preprocess_mask_arguments": {
        "5.17.0": "68ba4d398a0f35c2",
        "5.23.0": "68ba4d398a0f35c2",
    },
    "masking_utils:create_causal_mask": {
        "5.17.0": "7ea344bede08ea7f",
        "5.23.0": "515c860aaa8eacdc",
    },
    "masking_utils:create_sliding_window_causal_mask": {
        "5.17.0": "3b88eaeb266b430a",
        "5.23.0": "51f73697b1fb2332",
    },
    "integrations.sdpa_attention:sdpa_attention_forward": {
        "5.17.0": "db13750cb94980ca",
        "5.23.0": "f924d2ab95003975",
    },
    "cache_utils:Cache.update": {
        "5.17.0": "473e3d3df4ca8a8e",
        "5.23.0": "2103a493294e0c3e",
    },
    "cache_utils:Cache.get_seq_length": {
        "5.17.0": "e819d858bfb02e70",
        "5.23.0": "00061ea493e9bd8b",
    },
    "cache_utils:Cache.get_mask_sizes": {
        "5.17.0": "c78cc4f4ca5f786f",
        "5.23.0": "c480ab7d225b8409",
    },
    "cache_utils:Cache.get_query_offset": {
        "5.17.0": "ff1f9ae901cdf849",
        "5.23.0": "ff1f9ae901cdf849",
    },
    "cache_utils:Cache.crop": {
        "5.17.0": "18324fef7e58fe47",
        "5.23.0": "18324fef7e58fe47",
    },
    "cache_utils:DynamicCache.__init__": {
        "5.17.0": "8d65226dd2460f43",
        "5.23.0": "8df18796c02590d3",
    },
    "cache_utils:EncoderDecoderCache.__init__": {
        "5.17.0": "a68c9a6323147b2b",
        "5.23.0": "a68c9a6323147b2b",
    },
    "cache_utils:DynamicLayer.update": {
        "5.17.0": "1ee84d5c34acfdcb",
        "5.23.0": "1ee84d5c34acfdcb",
    },
    "cache_utils:DynamicLayer.get_mask_sizes": {
        "5.17.0": "dfd3237554c350a9",
        "5.23.0": "dfd3237554c350a9",
    },
    "cache_utils:DynamicLayer.crop": {
        "5.17.0": "94e5612809f3bd81",
        "5.23.0": "7a6da66819eac764",
    },
    "cache_utils:DynamicSlidingWindowLayer.get_mask_sizes": {
        "5.17.0": "aaa5c8baf0ca74ff",
        "5.23.0": "aaa5c8baf0ca74ff",
    },
    "expand_kv of all models": {
        "5.17.0": "a16caf5eecf7681a",
        "5.23.0": "a16caf5eecf7681a",
    },
}
