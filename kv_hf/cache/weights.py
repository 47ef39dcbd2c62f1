"""The numbers that a model's keys and values come from: which tensors count, and samples of them.

A tensor of up to WHOLE numbers is read whole. Of a larger one, seen as a matrix of its last dimension, at least one number of
each row is read, and of each column if there are that many rows:

    row 0   x . . . . x        storage order, every `step`-th number; step < columns, so that no row is passed over,
    row 1   . . . . x .        and without a common divisor with columns, so that the samples wander through all of them
    row 2   . . . x . .
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from .adapters import idle_parts, virtual_tensors, without_adapters

WHOLE = 2**14
# parts of names that wrappers put in
WRAPPERS = {"base_layer", "original_module", "_orig_mod"}
# integers with the bits of numbers of a size in bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer.

    Attributes:
        name: its name without what wrappers add to it.
        tensor: the numbers; on the meta device where nobody can tell them.
        source: where the numbers lie if they are not in memory, and when they were written; "" otherwise.
        resident: whether the model itself holds the tensor (else accelerate brings it in each forward).
        persistent: whether it belongs to the state dict.
    """

    name: str
    tensor: torch.Tensor
    source: str = ""
    resident: bool = True
    persistent: bool = True


def weights_of(model: Any) -> list[Weight]:
    """Return all parameters and buffers that forwards of `model` use, in the order of their names, tied ones once.

    Those of adapters that are not active, or merged, are left out.
    """
    idle, idle_tensors = idle_parts(model)
    found: dict[int, Weight] = {}
    for prefix, module in without_adapters(model).named_modules():
        if id(module) in idle:
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (id(module), name) not in idle_tensors:
                persistent = name not in module._non_persistent_buffers_set
                path = ".".join(
                    part for part in (*prefix.split("."), name) if part and part not in WRAPPERS
                )
                if id(tensor) not in found:
                    found[id(tensor)] = _weight(path, module, name, tensor, persistent)
    for name, tensor in virtual_tensors(model).items():
        found[id(tensor)] = Weight(name, tensor)
    return sorted(found.values(), key=lambda weight: weight.name)


def _weight(
    path: str, module: torch.nn.Module, name: str, tensor: torch.Tensor, persistent: bool
) -> Weight:
    """Return one weight; where accelerate keeps the numbers elsewhere, those."""
    if not tensor.is_meta:
        return Weight(path, tensor, persistent=persistent)
    hook: Any = vars(module).get("_hf_hook")
    for one in getattr(hook, "hooks", None) or [hook]:
        kept: Any = getattr(one, "weights_map", None)
        if kept is None:
            continue
        full = name
        while hasattr(kept, "dataset") and hasattr(kept, "prefix"):  # accelerate's PrefixedDataset
            kept, full = kept.dataset, f"{kept.prefix}{full}"
        entry = (getattr(kept, "index", None) or {}).get(full, {})
        if entry.get("safetensors_file"):  # a checkpoint's own file: reading it would take long
            return Weight(path, tensor, _source(entry), False, persistent)
        if full in kept:
            return Weight(path, kept[full], "", False, persistent)
    return Weight(path, tensor, persistent=persistent)


def _source(entry: Mapping[str, Any]) -> str:
    """Return where a tensor lies in a checkpoint's file, and when that was written."""
    path = Path(entry["safetensors_file"])
    written = path.stat().st_mtime_ns if path.exists() else 0
    return f"{path} {entry.get('weight_name')} {written}"


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors [any shape] that a tensor is made of (a quantized or sharded one: those of this process)."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor.detach()


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the samples of a plain tensor: [count], integers of the numbers' size, mostly a view.

    Raises: ValueError for a tensor without numbers (meta).
    """
    if tensor.is_meta:
        raise ValueError("a meta tensor has no numbers")
    bits = tensor.view(_BITS[tensor.dtype.itemsize])
    if bits.numel() <= WHOLE:
        return bits.reshape(-1)
    columns = bits.shape[-1]
    step = _step(bits.numel() // columns, columns)
    if bits.is_contiguous():
        return bits.view(-1)[::step]
    places = torch.arange(0, bits.numel(), step, device=bits.device)
    return bits[torch.unravel_index(places, bits.shape)]


def _step(rows: int, columns: int) -> int:
    """Return the distance of samples: below `columns`, no more than `rows`, without a common divisor with `columns`."""
    step = max(1, min(rows, columns - 1))
    while gcd(step, columns) > 1:
        step -= 1
    return step


def digests(weights: Iterable[Weight]) -> Iterator[tuple[Weight, bytes | None]]:
    """Yield each weight with the SHA-256 of its samples, or None where its numbers cannot be read."""
    for weight in weights:
        digest = hashlib.sha256()
        try:
            for part in plain_parts(weight.tensor):
                digest.update(_bytes(sample(part)))
        except Exception:  # a kind of tensor that cannot be viewed or copied must not stop a save
            yield weight, None
        else:
            yield weight, digest.digest()


def fingerprint(weights: Iterable[Weight], places: bool = True) -> bytes:
    """Return the SHA-256 of the samples of all weights, and of where those lie and how often they were written to.

    Without `places` copies of a model have one fingerprint.

    The samples of one device and size travel together, so that a GPU is asked a few times only.
    """
    digest = hashlib.sha256()
    together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for weight in weights:
        tensor = weight.tensor
        digest.update(f"{weight.name} {list(tensor.shape)} {tensor.dtype} {weight.source}".encode())
        try:
            found = [(part, sample(part)) for part in plain_parts(tensor)]
        except Exception:  # a kind of tensor that cannot be viewed; meta tensors
            found = []
        for part, bits in found:
            together.setdefault((bits.device, bits.dtype), []).append(bits)
            if places and weight.resident and weight.persistent:
                written = -1 if part.is_inference() else part._version
                digest.update(f" {part.data_ptr()} {written}".encode())
    for bits_of_all in together.values():
        digest.update(_bytes(torch.cat(bits_of_all)))
    return digest.digest()


def _bytes(bits: torch.Tensor) -> bytes:
    return bits.cpu().contiguous().view(torch.uint8).numpy().tobytes()
