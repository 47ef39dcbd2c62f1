"""Kernels whose functions a test wraps."""

from dataclasses import replace

from kv_hf.backends import registry


def wrap_kernels(patch, **wrappers):
    """Let caches that are made from now on have wrapped kernels.

    Args:
        patch: pytest's monkeypatch.
        wrappers: a function of a Backend by its name -> what takes that function and returns another.
    """
    load = registry.load

    def wrapped(name):
        kernel = load(name)
        return replace(
            kernel, **{one: wrap(getattr(kernel, one)) for one, wrap in wrappers.items()}
        )

    patch.setattr(registry, "load", wrapped)
