"""The names of attention backends in the order in which "auto" tries them. Knows no backend.

Options are checked against these names below the backends, which register theirs here.
"""

AUTO = "auto"
# words that others use -> the backend that comes nearest
OTHER_WORDS = {
    **dict.fromkeys(("cuda", "gpu", "nvidia", "rocm", "hip"), "triton"),
    **dict.fromkeys(("cpu", "native", "c++", "cpp"), "c"),
    **dict.fromkeys(("flash", "flash_attention_2", "efficient", "math"), "sdpa"),
    **dict.fromkeys(("torch", "pytorch", "eager", "naive", "python"), "reference"),
}

_priorities: dict[str, float | None] = {}


def add_backend_name(name: str, priority: float | None) -> None:
    """Add a name; see `kv_hf.backends.register_backend`."""
    _priorities[name] = priority


def remove_backend_name(name: str) -> None:
    """Take a name back. Raises KeyError for one that is not there."""
    del _priorities[name]


def auto_names() -> tuple[str, ...]:
    """Return the names that "auto" tries, the highest priority first."""
    found = {name: priority for name, priority in _priorities.items() if priority is not None}
    return tuple(sorted(found, key=found.__getitem__, reverse=True))


def backend_names() -> tuple[str, ...]:
    """Return all names: those that "auto" tries in their order, then those that have to be asked for."""
    return (*auto_names(), *(name for name, priority in _priorities.items() if priority is None))


def kernel_choices() -> tuple[str, ...]:
    """Return what the option `kernel` may be."""
    return (AUTO, *backend_names())
