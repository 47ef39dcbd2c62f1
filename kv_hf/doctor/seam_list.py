"""The seams to transformers: what kv_hf patches, calls or overrides, each with the parameters that it counts on."""

from dataclasses import dataclass

TESTED = ("5.17.0", "5.23.0")  # versions of transformers that the whole test suite ran with


@dataclass(frozen=True)
class Seam:
    """Something of transformers that kv_hf stands on.

    Attributes:
        place: "module:name", the name with dots; the module lies within transformers.
        use: what it is for.
        parameters: names that the function has to know; None: it is no function, or its parameters are of no matter.
        told: whether the doctor reports a change in this function's source: kv_hf replaces it or relies on its behaviour.
        since: first version that has it.
    """

    place: str
    use: str
    parameters: tuple[str, ...] | None = None
    told: bool = False
    since: str = TESTED[0]

    @property
    def name(self) -> str:
        """The name within its module."""
        return self.place.partition(":")[2]


_CONFIGURATION = "generation.configuration_utils"
_BATCHING = "generation.continuous_batching"
_GENERATION = "generation.utils:GenerationMixin"
_MODEL = "modeling_utils:PreTrainedModel"
_CACHE = "cache_utils"
_MASKS = "masking_utils"
_SIZES_OF_A_CALL = ("generation_mode", "batch_size", "max_cache_length")
_MASK_SIZES = ("batch_size", "q_length", "kv_length")
_UPDATE = ("self", "key_states", "value_states")

SEAMS = (
    # hf/install.py, hf/static_generation.py, hf/prefix.py: what is patched
    Seam(f"{_CONFIGURATION}:ALL_CACHE_IMPLEMENTATIONS", "holds the names that paged_* join"),
    Seam(f"{_CONFIGURATION}:GenerationConfig.validate", "reads that list", ("self",), told=True),
    Seam(
        f"{_GENERATION}.generate",
        "is the whole call (patched, for the tokens that a cache holds and for notices)",
        ("self", "inputs", "streamer", "custom_generate"),
    ),
    Seam(
        f"{_GENERATION}._prepare_cache_for_generation",
        "makes the cache (patched)",
        ("self", "generation_config", "model_kwargs", *_SIZES_OF_A_CALL),
        told=True,
    ),
    Seam(
        f"{_GENERATION}._prefill",
        "runs the first forward (patched, for prefix stores)",
        ("self", "input_ids", "generation_config", "model_kwargs"),
        told=True,
    ),
    Seam(f"{_GENERATION}._supports_default_dynamic_cache", "says whether a model has a Cache", ()),
    Seam(
        f"{_GENERATION}._valid_auto_compile_criteria",
        "says whether decode steps are compiled (patched, for CUDA graphs)",
        ("self", "model_kwargs", "generation_config"),
        told=True,
    ),
    Seam(
        f"{_MODEL}.get_compiled_call",
        "gives what runs a decode step (patched, for CUDA graphs)",
        ("self", "compile_config"),
        told=True,
    ),
    Seam(
        f"{_GENERATION}._supports_logits_to_keep", "spares the logits of shared prefixes", ("self",)
    ),
    # hf/attention.py, hf/dense.py, hf/models.py: attention and masks
    Seam(
        f"{_MODEL}.get_correct_attn_implementation",
        "is asked for the name of an attention (patched)",
        ("self", "requested_attention"),
        told=True,
    ),
    Seam("modeling_utils:AttentionInterface.register", "knows the attention", ("key", "value")),
    Seam("modeling_utils:AttentionInterface._global_mapping", "gives the attention back"),
    Seam(f"{_MASKS}:AttentionMaskInterface.register", "knows the mask", ("key", "value")),
    Seam(f"{_MASKS}:AttentionMaskInterface._global_mapping", "gives the mask back"),
    Seam(
        f"{_MASKS}:sdpa_mask",
        "makes the masks of dense tensors",
        (*_MASK_SIZES, "attention_mask", "local_size", "device", "allow_is_causal_skip"),
        told=True,
    ),
    Seam(
        f"{_MASKS}:_preprocess_mask_arguments",
        "hands the cache's kv_length to the mask, by which left padding is learnt",
        told=True,
    ),
    Seam(f"{_MASKS}:create_causal_mask", "calls the mask by its name", told=True),
    Seam(f"{_MASKS}:create_sliding_window_causal_mask", "calls the mask by its name", told=True),
    Seam(
        "integrations.sdpa_attention:sdpa_attention_forward",
        "attends to dense tensors",
        ("module", "query", "key", "value", "attention_mask", "dropout", "scaling"),
        told=True,
    ),
    Seam(
        f"{_MODEL}.set_attn_implementation",
        "switches the attention",
        ("self", "attn_implementation"),
    ),
    Seam(f"{_MODEL}._can_set_attn_implementation", "says whether a model can be switched", ()),
    Seam(f"{_MODEL}._supports_sdpa", "tells models whose own attention is eager"),
    # serving/batch_manager.py: continuous batching
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousBatchingManager.__init__",
        "begins continuous batching (patched)",
        ("self", "model", "generation_config", "continuous_batching_config"),
    ),
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousBatchingManager.switch_to_cb_friendly_attn",
        "chooses the attention of batches (patched)",
        ("self", "model"),
    ),
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousBatchingManager._create_batch_processor",
        "makes the cache of batches (patched)",
        ("self",),
    ),
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousBatchingManager.stop",
        "gives a model its attention back (patched)",
        ("self",),
    ),
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousBatchingManager.add_request",
        "adds a request to batches (patched, for cache_salt)",
        ("self", "input_ids", "request_id"),
    ),
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousMixin.init_continuous_batching",
        "makes a manager or gives back one that was kept (patched)",
        ("self", "generation_config", "continuous_batching_config"),
    ),
    Seam(
        f"{_BATCHING}.continuous_api:ContinuousMixin.generate_batch",
        "runs a batch of prompts (patched, for the name of a cache)",
        ("self", "inputs", "generation_config", "continuous_batching_config"),
    ),
    Seam(f"{_BATCHING}.continuous_api:PagedAttentionCache", "is the cache of batches (replaced)"),
    Seam(
        f"{_BATCHING}.model_runner:ModelRunner.compute_batch",
        "runs a forward of batches",
        ("self", "model", "batch_data"),
    ),
    Seam(
        f"{_BATCHING}.cache_allocators:CacheAllocator",
        "tells the batching that pages know (5.18 and newer)",
        since="5.18.0",
    ),
    # cache/: what the paged cache inherits and overrides
    Seam(f"{_CACHE}:Cache.update", "calls the layers", (*_UPDATE, "layer_idx"), told=True),
    Seam(f"{_CACHE}:Cache.get_seq_length", "asks the layers", ("self", "layer_idx"), told=True),
    Seam(
        f"{_CACHE}:Cache.get_mask_sizes",
        "asks the layers",
        ("self", "query_length", "layer_idx"),
        told=True,
    ),
    Seam(f"{_CACHE}:Cache.get_query_offset", "asks the cache", ("self", "layer_idx"), told=True),
    Seam(f"{_CACHE}:Cache.crop", "rolls tokens back", ("self", "tokens_to_remove"), told=True),
    Seam(f"{_CACHE}:Cache.reset", "empties (overridden)", ("self",)),
    Seam(f"{_CACHE}:Cache.reorder_cache", "picks beams (overridden)", ("self", "beam_idx")),
    Seam(f"{_CACHE}:Cache.batch_repeat_interleave", "repeats rows", ("self", "repeats")),
    Seam(f"{_CACHE}:Cache.batch_select_indices", "picks rows", ("self", "indices")),
    Seam(f"{_CACHE}:Cache.activate_past_recording", "lets tokens be rolled back", ("self",)),
    Seam(
        f"{_CACHE}:Cache.early_initialization",
        "makes the tensors of a preallocated cache",
        ("self", "batch_size", "num_heads", "head_dim", "dtype", "device"),
    ),
    Seam(f"{_CACHE}:Cache.update_indexer", "keeps indexer keys", ("self", "indexer_key_states")),
    Seam(f"{_CACHE}:Cache.is_linear", "tells layers without pages"),
    Seam(
        f"{_CACHE}:DynamicCache.__init__",
        "makes the layers that pages replace",
        ("self", "config"),
        told=True,
    ),
    Seam(f"{_CACHE}:EncoderDecoderCache.__init__", "holds two caches", ("self",), told=True),
    Seam(f"{_CACHE}:CacheLayerMixin.__init__", "is a preallocated layer's parent", ("self",)),
    Seam(f"{_CACHE}:CacheLayerMixin.is_compileable", "says what torch.compile may trace"),
    Seam(f"{_CACHE}:DynamicLayer.update", "is overridden", _UPDATE, told=True),
    Seam(f"{_CACHE}:DynamicLayer.lazy_initialization", "is overridden", _UPDATE),
    Seam(
        f"{_CACHE}:DynamicLayer.get_mask_sizes",
        "is overridden",
        ("self", "query_length"),
        told=True,
    ),
    Seam(f"{_CACHE}:DynamicLayer.crop", "is overridden", ("self", "tokens_to_remove"), told=True),
    Seam(f"{_CACHE}:DynamicSlidingWindowLayer", "is what sliding pages replace"),
    Seam(
        f"{_CACHE}:DynamicSlidingWindowLayer.get_mask_sizes",
        "is what sliding pages answer like",
        ("self", "query_length"),
        told=True,
    ),
    Seam(f"{_CACHE}:DynamicIndexedLayer", "is what latents with indexer keys replace"),
    Seam(f"{_CACHE}:LinearAttentionAndFullAttentionLayer", "is what pages beside a state replace"),
    Seam(f"{_CACHE}:LinearAttentionCacheLayerMixin.__init__", "makes a state", ("self",)),
    Seam(
        f"{_CACHE}:LinearAttentionLayer.lazy_initialization",
        "makes the tensors of a state",
        ("self", "conv_states", "recurrent_states"),
    ),
    Seam(
        f"{_CACHE}:LinearAttentionCacheLayerMixin.crop",
        "rolls a state back",
        ("self", "tokens_to_remove"),
    ),
    Seam(f"{_CACHE}:DummyLayer", "is a layer that holds nothing", since="5.18.0"),
)
