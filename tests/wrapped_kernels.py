"""Kernels whose functions a test wraps, and a CUDA graph without a GPU, which records what wrapped kernels compute.

What a function computes is recorded call by call, and done again on the same tensors. As in a CUDA graph, Python code runs once, its
numbers stay as they were, reading a number is an error, and inputs are read from where they lay. Unlike there, recording also computes.
"""

from dataclasses import replace

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kv_hf.backends import dispatch


def wrap_kernels(patch, **wrappers):
    """Let caches that are made from now on have wrapped kernels.

    Args:
        patch: pytest's monkeypatch.
        wrappers: a function of a Backend by its name -> what takes that function and returns another.
    """
    load = dispatch.load

    def wrapped(name):
        kernel = load(name)
        return replace(
            kernel, **{one: wrap(getattr(kernel, one)) for one, wrap in wrappers.items()}
        )

    patch.setattr(dispatch, "load", wrapped)


WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


class Tape(TorchDispatchMode):
    """Records the operators of a block, and calls of kernels that `taped` wraps."""

    active = None

    def __init__(self):
        super().__init__()
        self.calls = []

    def __enter__(self):
        Tape.active = self
        return super().__enter__()

    def __exit__(self, *error):
        Tape.active = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        made = func(*args, **(kwargs or {}))
        views = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if not views:
            self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self):
        """Do all of it again."""
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for held, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(again), strict=True):
                if isinstance(held, torch.Tensor) and held is not new:
                    held.copy_(new)


def capture(function):
    """Stand in for kv_hf.hf.step_graph.capture."""
    with Tape() as tape:
        made = function()
    return tape.replay, made


def taped(function):
    """Record calls of a kernel that is no operator of torch."""

    def call(*args, **kwargs):
        tape = Tape.active
        if tape is None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            made = function(*args, **kwargs)
        tape.calls.append((function, args, kwargs, made))
        return made

    return call


def use_taped_kernels(monkeypatch):
    """Let every cache made from now on have kernels that a tape records."""
    names = ("write", "attend", "choose_pages", "dense")
    wrap_kernels(monkeypatch, **dict.fromkeys(names, taped))
