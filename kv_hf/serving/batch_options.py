"""What is asked of continuous batching on pages, and refused where it cannot be, before anything is changed."""

from typing import Any

from ..cache.model_shape import is_encoder_decoder
from ..config import CacheConfig, names_of
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import is_cache_name
from ..hf.models import why_not_pages


def options_of(generation_config: Any) -> CacheConfig | None:
    """Return the options of the paged cache that `generation_config` names, or None where it names none.

    Raises: CacheOptionError for options that continuous batching cannot follow.
    """
    name = getattr(generation_config, "cache_implementation", None)
    if name is None or not is_cache_name(name):
        return None
    options = CacheConfig.from_options(name, generation_config.cache_config)
    for option in names_of("call"):
        if getattr(options, option) not in (None, 0):
            raise CacheOptionError(
                f"{option}={getattr(options, option)!r} is for one call of generate(); continuous batching allocates all pages when it "
                "starts (cache_config={'max_bytes': ..}, and cpu_offload_space of the ContinuousBatchingConfig for requests that "
                "find no room). Leave it out"
            )
    if options.cuda_graph == "always":
        raise CacheOptionError(
            "cuda_graph='always': continuous batching on pages makes no CUDA graphs; leave it out"
        )
    return options


def check_batching(config: Any) -> None:
    """Raise CacheOptionError for what a ContinuousBatchingConfig asks and pages cannot do."""
    if config is None:
        return
    graphs = config.use_cuda_graph
    asked = {
        "use_cuda_graph": any(graphs) if isinstance(graphs, tuple | list) else graphs,
        "use_async_batching": config.use_async_batching,
        "varlen_compile_config": config.varlen_compile_config,
        "decode_compile_config": config.decode_compile_config,
        "default_compile_level": config.default_compile_level,
        "q_padding_interval_size": config.q_padding_interval_size,
        "kv_padding_interval_size": config.kv_padding_interval_size,
    }
    for name, value in asked.items():
        if value:
            raise CacheOptionError(
                f"{name}={value!r} of the ContinuousBatchingConfig: forwards over pages are neither compiled nor captured in "
                "graphs, and run one after the other; leave it out"
            )


def check_model(model: Any) -> None:
    """Raise UnsupportedModelError where a model cannot attend over pages, or runs on several devices or processes."""
    name = type(model).__name__
    if is_encoder_decoder(model.config):
        raise UnsupportedModelError(
            f"continuous batching is for decoders, and {name} has an encoder"
        )
    reason = why_not_pages(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"continuous batching on pages needs attention that reads them, which {name} has not: {reason}"
        )
    if getattr(model, "_device_mesh", None) is not None:
        raise UnsupportedModelError(
            "continuous batching on pages runs in one process; this model is spread by tensor parallelism"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"continuous batching runs on one device, and the weights of {name} lie on {', '.join(sorted(map(str, devices)))}"
        )
