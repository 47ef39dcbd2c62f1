"""What a process with two pretended devices does in test_devices.py: each case that it is given by name writes "ok" or its error.

Layer 0 and the rest of the model lie on one device and layer 1 on the other, moved to by accelerate's own hook.

CPU tensors that claim to lie on GPUs, so that code for several devices can be run without any.

A `Pretended` tensor holds an ordinary CPU tensor and a device such as cuda:1. Operations compute on the CPU, and
refuse operands of two devices as torch does: only copies, and 0-dim tensors or indices from the CPU, may cross.
`pretended()` makes factories and moves (`device=`, `.to`, `.cpu`) answer with such tensors.
"""

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tiny_models import FAMILIES, left_padded, make_model, tokens
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import kv_hf
from kv_hf.bridge.handles import LazyKV
from kv_hf.bridge.masks import LazyMask

FIRST, SECOND = torch.device("privateuseone", 0), torch.device("privateuseone", 1)
CROSSING = ("aten::copy_", "aten::_to_copy")
UNASKED = ("scaled_dot_product_attention", "where", "__setitem__")
INDEXING = ("aten::index", "aten::index_put_", "aten::index_put")


class Pretended(torch.Tensor):
    """A CPU tensor `held` that claims to lie on another device."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "Pretended":
        options = {"strides": inner.stride(), "dtype": inner.dtype, "device": device}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)
        self.held = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name not in CROSSING:
            refuse_strangers(name, (args, kwargs))
        pretended = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        device = kwargs["device"] if kwargs.get("device") is not None else pretended[0].device
        device = torch.device(device)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        known = {id(x.held): x for x in pretended}
        result = func(
            *tree_map_only(cls, lambda x: x.held, args),
            **tree_map_only(cls, lambda x: x.held, kwargs),
        )
        if name == "aten::copy_":
            return args[0]

        def back(x: torch.Tensor) -> torch.Tensor:
            return known.get(id(x)) if id(x) in known else place(x, device)

        return tree_map_only(torch.Tensor, back, result)

    def __deepcopy__(self, memo: Any) -> "Pretended":
        return Pretended(self.held.clone(), self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretended({self.held}, device={self.device})"


def refuse_strangers(name: str, arguments: Any) -> None:
    """Raise RuntimeError where tensors of two devices meet, as torch does."""
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    devices = {x.device for x in leaves if isinstance(x, Pretended)}
    strangers = [x for x in leaves if not isinstance(x, Pretended) and x.ndim]
    if name in INDEXING:
        strangers = [x for x in strangers if x.dtype not in (torch.int64, torch.bool)]
    if len(devices) > 1 or (devices and strangers):
        found = sorted(str(x.device) for x in leaves)
        raise RuntimeError(f"Expected all tensors to be on the same device, got {found}: {name}")


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` (on the CPU) as one on `device`."""
    if isinstance(tensor, Pretended):
        tensor = tensor.held
    return tensor if device.type == "cpu" else Pretended(tensor, device)


class _Devices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu") and args and isinstance(args[0], torch.Tensor):
            return self._move(func, name, args, kwargs)
        if name in UNASKED and any(isinstance(x, Pretended) for x in args):
            return _compute_inside(func, name, args, kwargs)
        if name == "__getitem__" and isinstance(args[0], Pretended) and isinstance(args[1], list):
            return _compute_inside(func, name, args, kwargs)
        if name == "tolist" and isinstance(args[0], Pretended):
            return args[0].held.tolist()
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        if any(isinstance(x, Pretended) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)  # it dispatches, with its device
        made = func(*args, **{**kwargs, "device": "cpu"})
        return tree_map(lambda x: place(x, torch.device(device)), made)

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        wanted = torch.device("cpu") if name == "cpu" else kwargs.pop("device", None)
        others = []
        for value in rest:
            if isinstance(value, torch.Tensor):
                wanted, kwargs["dtype"] = value.device, value.dtype
            elif isinstance(value, (str, torch.device)):
                wanted = torch.device(value)
            else:
                others.append(value)
        inner = tensor.held if isinstance(tensor, Pretended) else tensor
        wanted = tensor.device if wanted is None else torch.device(wanted)
        if isinstance(tensor, LazyMask):
            if wanted == tensor.device:
                return tensor
            make = lambda: tensor.dense().to(wanted)  # noqa: E731
            return LazyMask(tuple(tensor.shape), wanted, make, tensor.causal)
        kwargs.pop("non_blocking", None)
        moved = inner.to(*others, **kwargs) if others or kwargs else inner
        if wanted == tensor.device and moved is inner:
            return tensor
        if wanted != tensor.device and moved is inner:
            moved = inner.clone()
        return place(moved, wanted)


def _compute_inside(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Compute on the tensors held, where torch makes a tensor of the device without asking the dispatch above."""
    args, kwargs = tree_map_only(LazyKV, LazyKV.dense, (args, kwargs))
    refuse_strangers(name, (args, kwargs))
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Pretended)]
    args, kwargs = tree_map_only(Pretended, lambda x: x.held, (args, kwargs))
    return tree_map_only(torch.Tensor, lambda x: place(x, leaves[0].device), func(*args, **kwargs))


class _Backend:
    """What torch asks of the module of a device type."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Tell torch of a device type without a compiled part. For a process of its own: it cannot be undone."""
    _setup_privateuseone_for_python_backend(backend_module=_Backend())


@contextmanager
def pretended() -> Iterator[None]:
    """Pretend that cuda:0, cuda:1 and so on are there."""
    with _Devices(), torch.no_grad():
        yield


def move_module(module: torch.nn.Module, device: torch.device) -> None:
    """Put the parameters and buffers of `module` on a pretended device."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                tensor = place(parameter.detach(), device)
                part._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = place(buffer, device)


KERNEL = {"kernel": "reference", "page_size": 16}
HYBRID = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 24}


def split(model: Any) -> Any:
    """Put layer 1 on the second device and everything else on the first."""
    move_module(model, FIRST)
    last = model.model.layers[1]
    move_module(last, SECOND)
    add_hook_to_module(last, AlignDevicesHook(execution_device=SECOND, io_same_device=True))
    return model


def compare(family: str = "llama", name: str = "paged_exact", **options: Any) -> kv_hf.PagedCache:
    """Generate on one device and on two, compare the tokens and where the cache lies; return the cache."""
    batch = left_padded([40, 18])
    options = {
        "cache_implementation": name, "cache_config": KERNEL, "max_new_tokens": 20, "do_sample": False,
        "return_dict_in_generate": True, **options,
    }  # fmt: skip
    attention = options.pop("attention", "sdpa")
    model = make_model(family, attn_implementation=attention)
    torch.manual_seed(3)
    want = model.generate(**batch, **options).sequences
    with pretended():
        model = split(make_model(family, attn_implementation=attention))
        moved = {key: tensor.to(FIRST) for key, tensor in batch.items()}
        torch.manual_seed(3)
        out = model.generate(**moved, **options)
        assert isinstance(out.sequences, Pretended)
        assert torch.equal(out.sequences.held, want), "other tokens"
        cache = out.past_key_values
        if isinstance(cache, kv_hf.PagedCache):
            for layer in cache.paged_layers:
                device = (FIRST, SECOND)[layer.layer_idx]
                parts = [t for side in layer.storage.sides for t in side.fields.values()]
                parts += [window.tokens for window in layer.residuals]
                assert {part.device for part in parts} == {device} == {layer.device}
                assert layer.storage.keys.capacity, "nothing was sealed"
            cache.check_integrity()
    return cache


def crop_select_and_copy() -> None:
    """Row numbers come from the first device, or from the CPU; a crop into a page decodes it where it lies."""
    ids = tokens(2, 50)
    results = []
    with pretended():
        for on_two in (False, True):
            model = make_model("llama")
            model = split(model) if on_two else model
            device = FIRST if on_two else torch.device("cpu")
            cache = kv_hf.PagedCache(model.config, keys="int4", sink_tokens=0, **KERNEL)
            model(ids.to(device), past_key_values=cache)
            cache = copy.deepcopy(cache)
            cache.reorder_cache(torch.tensor([1, 0]).to(device))
            cache.batch_select_indices(torch.tensor([True, False]).to(device))
            cache.batch_repeat_interleave(2)
            cache.crop(-14)
            logits = model(tokens(2, 3, seed=1).to(device), past_key_values=cache).logits
            results.append(getattr(logits, "held", logits))
    assert torch.equal(*results)


def tables_are_counted_on_each_device() -> None:
    cache = compare()
    assert cache.memory().tables == 2 * (
        2 * 3 * 4
    )  # devices x rows x pages of the longer row x int32


def keys_on_another_device_are_refused() -> None:
    """The cache of a model that was split otherwise since."""
    with pretended():
        cache = kv_hf.PagedCache(make_model("llama").config, **KERNEL)
        keys = torch.ones(1, 2, 20, 16)
        cache.update(keys.to(FIRST), keys.to(FIRST), 0)
        cache.update(keys.to(SECOND), keys.to(SECOND), 1)
        with pytest.raises(kv_hf.CacheMismatchError, match=f"on {FIRST}.* on {SECOND}"):
            cache.update(keys.to(SECOND), keys.to(SECOND), 0)


# how a generation on two devices is compared with one on a single device; layer 1 of "gemma3_text" keeps transformers' sliding layer
COMPARED: dict[str, dict[str, Any]] = {
    "greedy_k8v4": {"name": "paged_k8v4"},
    "int8_pages_and_recent_tokens": {
        "name": "paged_int8",
        "cache_config": {**KERNEL, "page_size": 32, "recent_tokens": 3},
    },
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "chunked_prefill": {"name": "paged_int8", "prefill_chunk_size": 17},
    "hybrid_beams": {"family": "gemma3_text", "num_beams": 2},
    "dense_attention": {"name": "paged_k8v4", "attention": "eager"},
}
CASES: dict[str, Callable[[], Any]] = {
    **{name: partial(compare, **options) for name, options in COMPARED.items()},
    "crop_select_and_copy": crop_select_and_copy,
    "tables_are_counted_on_each_device": tables_are_counted_on_each_device,
    "keys_on_another_device_are_refused": keys_on_another_device_are_refused,
}


def main() -> None:
    torch.set_num_threads(1)
    register()
    FAMILIES["gemma3_text"] = {**FAMILIES["gemma"], **HYBRID}  # here only
    results = {}
    for name in sys.argv[1:]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                CASES[name]()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
