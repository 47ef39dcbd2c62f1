"""Triton's interpreter in a third of the time: without what it does in vain, or anew for each operation. Results are the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """Replace parts of the interpreter in this process; one that works otherwise than triton 3.6's is left as it is."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    # each sum and product of integers is computed again in int64, and what does not fit is not even reported
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _replace_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.apply_impl = _xor_at_once(interpreter.ReduceOps.apply_impl)
    core.block_type.__init__, core.tensor.__init__ = _known_shapes()


def _replace_once(replace_all: Callable[..., Any]) -> Callable[..., Any]:
    """Each call of a jitted function inside a kernel replaces all functions of triton.language, which are replaced already."""
    modules: dict[int, list[Any]] = {}

    def replace_new(fn: Any) -> Any:
        known = fn.__globals__
        if id(known) not in modules:
            modules[id(known)] = [
                one for one in (tl, core) if any(x is one for x in known.values())
            ]
        found = modules[id(known)]
        if found and not any(core.is_builtin(module.load) for module in found):
            return interpreter._LangPatchScope()
        return replace_all(fn)

    return replace_new


def _by_name(dtype_of: Callable[..., Any]) -> Callable[..., Any]:
    """A dictionary of all dtypes is made to look one up."""
    dtypes: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    return look_up


def _xor_at_once(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A sort takes the xor of pairs, one number at a time."""

    def apply(self: Any, given: tuple[Any, ...]) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return reduce(self, given)
        [x] = given
        data = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, x.dtype)

    return apply


def _known_shapes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A shape is checked, and written into a name, for every block, and made a tuple once more for every tensor."""
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    scalar = core.tuple(()), core.constexpr(1)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([one.value if isinstance(one, core.constexpr) else one for one in shape])
        if sizes not in shapes:
            numel, of_tensor = core.validate_block_shape(sizes), map(core.constexpr, sizes)
            shapes[sizes] = core.tuple(sizes), numel, core.tuple(of_tensor), core.constexpr(numel)
        self.shape, self.numel, *self.of_tensor = shapes[sizes]
        self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.of_tensor if kind.is_block() else scalar

    return block, tensor
