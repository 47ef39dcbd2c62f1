"""By what a file knows the model that its keys and values came from. Compares; decides no more than that.

Three things are kept: the sizes that caches are told apart by, the decoder's config, and a fingerprint of the
weights. The fingerprint finds other names, shapes and dtypes of parameters and persistent buffers, and, in each
of them, a change of any of SAMPLES numbers spread evenly over it. So it finds another training, fine-tuning of whole
matrices, a merged adapter, another quantization. It does not find a change of a few numbers between the samples.
Parameters whose bytes cannot be read (meta tensors of an offloaded model) are known by name and shape only.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from ...printable import short
from ..model_shape import decoder_config, signature
from .container import RefusedError

SAMPLES = 64  # numbers of a parameter that its fingerprint reads
DIGITS = 8  # hexadecimal digits per parameter
UNREADABLE = "-" * DIGITS
# what may differ between two loads of one model without any effect on keys and values, besides what begins with "_"
IGNORED = {
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",  # the weights say it
    "eos_token_id",
    "experts_implementation",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "quantization_config",  # the weights say it
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def identity(model: Any) -> dict[str, Any]:
    """Return what `check_identity` compares, as plain JSON."""
    decoder = decoder_config(model.config)
    config = {
        name: value
        for name, value in decoder.to_dict().items()
        if name not in IGNORED and not name.startswith("_")
    }
    found = {"signature": signature(decoder), "config": config, "weights": _weights(model)}
    return json.loads(json.dumps(found, default=str))


def check_identity(saved: Any, model: Any) -> None:
    """Raise RefusedError, naming the first difference, unless `saved` is the identity of `model`.

    Names that only one of the two configs has are passed over: versions of transformers differ in them.
    """
    if not isinstance(saved, dict):
        raise RefusedError(f"it says nothing about its model: {short(saved)}")
    own = identity(model)
    for part in ("signature", "config"):
        theirs = saved.get(part)
        if not isinstance(theirs, dict):
            raise RefusedError(f"it says nothing about its model's {part}: {short(theirs)}")
        for name in [name for name in own[part] if name in theirs or part == "signature"]:
            if theirs.get(name) != own[part][name]:
                raise RefusedError(
                    f"it was saved with a model of {name}={short(theirs.get(name))}, this model has "
                    f"{name}={short(own[part][name])}"
                )
    _check_weights(saved.get("weights"), own["weights"], [name for name, _ in _tensors(model)])


def _check_weights(theirs: Any, own: dict[str, Any], names: list[str]) -> None:
    if not isinstance(theirs, dict) or set(theirs) != set(own):
        raise RefusedError(f"it has no fingerprint of its model's weights: {short(theirs)}")
    if theirs["dtypes"] != own["dtypes"]:
        raise RefusedError(
            f"it was saved with weights in {short(theirs['dtypes'])}, this model's are in {own['dtypes']}"
        )
    samples = theirs["samples"]
    comparable = isinstance(samples, str) and len(samples) == len(own["samples"])
    if theirs["structure"] != own["structure"] or not comparable:
        raise RefusedError(
            "it was saved with a model whose parameters have other names or shapes (another model, or adapters "
            "added or merged)"
        )
    assert isinstance(samples, str)
    for index, name in enumerate(names):
        pair = [text[index * DIGITS : (index + 1) * DIGITS] for text in (samples, own["samples"])]
        if pair[0] != pair[1] and UNREADABLE not in pair:
            raise RefusedError(f"it was saved with other weights: {name} differs")


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    tensors = list(_tensors(model))
    structure = hashlib.sha256()
    for name, tensor in tensors:
        structure.update(f"{name} {list(tensor.shape)}\n".encode())
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors)
    return {
        "structure": structure.hexdigest(),
        "dtypes": ", ".join(f"{dtype} x {count}" for dtype, count in sorted(dtypes.items())),
        "samples": "".join(_fingerprint(tensor) for _, tensor in tensors),
    }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers in the order of their names; tied ones once."""
    passing = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found.update(item for item in model.named_buffers() if item[0] not in passing)
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    yield from sorted(plain.items(), key=lambda item: item[0])


def _fingerprint(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256()
    try:
        for part in _parts(tensor):
            digest.update(_sample(part))
    except Exception:  # a kind of tensor that cannot be indexed or copied must not stop a save
        return UNREADABLE
    return digest.hexdigest()[:DIGITS]


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor is made of (a quantized or sharded one: those of this process)."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor.detach()


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of SAMPLES numbers, evenly spread from the first to the last; no copy of the whole is made."""
    if tensor.is_meta:
        raise ValueError("no bytes")
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.uint8:
        tensor = tensor.view(torch.uint8)  # float8: not every device can index it
    if not tensor.numel():
        return b""
    last, count = tensor.numel() - 1, min(SAMPLES, tensor.numel())
    places = torch.tensor([last * i // max(1, count - 1) for i in range(count)], device="cpu")
    index = torch.unravel_index(places, tensor.shape) if tensor.ndim else ()
    chosen = tensor[tuple(one.to(tensor.device) for one in index)].reshape(-1)
    return chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()
