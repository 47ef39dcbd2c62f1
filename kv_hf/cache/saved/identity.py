"""By what a file knows the model that its keys and values came from. Compares; decides no more than that.

Five things are kept: the sizes that caches are told apart by, the decoder's config, the adapters that forwards add, a
fingerprint of the weights, and numbers of the buffers that a checkpoint does not hold (rotary frequencies). The fingerprint finds other names, shapes and dtypes of parameters and persistent buffers,
and in each of them a change of any of the numbers that `weights.sample` reads: all of small tensors, at least one of
every row of large ones. Tensors of adapters that are not active, or merged, are left out. Parameters whose bytes
cannot be read (meta tensors) are known by name and shape only.

Buffers that a checkpoint does not hold are computed anew by each model, on whatever device: they are compared as numbers, with
a tolerance, where both have them in one shape. Those that forwards change with the length of the text are left out.
"""

import hashlib
import json
from collections import Counter
from typing import Any

import torch

from ...printable import short
from ..adapters import Adapters, adapters_of
from ..model_shape import decoder_config, rotates_by_length, signature
from ..weights import Weight, digests, weights_of
from .container import RefusedError

DIGITS = 8  # hexadecimal digits per parameter
UNREADABLE = "-" * DIGITS
BUFFER_NUMBERS = 128  # numbers kept of a buffer
TOLERANCE = 1e-3  # of a buffer's number; devices differ by less, and bfloat16 is found by the dtype of weights
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
    found = {
        "signature": signature(decoder),
        "config": config,
        "adapters": adapters_of(model).to_json(),
        "weights": _fingerprint(_saved_weights(model)),
        "buffers": _buffers(model),
    }
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
    adapters = _check_adapters(saved.get("adapters"), adapters_of(model))
    names = [weight.name for weight in _saved_weights(model)]
    _check_weights(saved.get("weights"), own["weights"], names, adapters)
    _check_buffers(saved.get("buffers", {}), own["buffers"])


def _check_adapters(saved: Any, own: Adapters) -> str:
    """Raise RefusedError unless both add the same; return what is known of merged adapters, for other messages."""
    theirs = Adapters.from_json(saved)
    if theirs is None:
        raise RefusedError(f"it says nothing about its model's adapters: {short(saved)}")
    if theirs.effective() != own.effective():
        same = str(theirs.effective()) == str(own.effective())
        rest = "; the settings of these adapters differ" if same else ""
        raise RefusedError(
            f"it was saved with {str(theirs)[:200]}, this model has {str(own)[:200]}{rest}"
        )
    if theirs.merged == own.merged:
        return ""
    return f" (adapters merged into them: {short(theirs.merged)} there, {short(own.merged)} here)"


def _check_weights(theirs: Any, own: dict[str, Any], names: list[str], adapters: str) -> None:
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
            "it was saved with a model whose parameters have other names or shapes (another model, or layers added)"
        )
    assert isinstance(samples, str)
    for index, name in enumerate(names):
        pair = [text[index * DIGITS : (index + 1) * DIGITS] for text in (samples, own["samples"])]
        if pair[0] != pair[1] and UNREADABLE not in pair:
            raise RefusedError(f"it was saved with other weights: {name} differs{adapters}")


def _buffers(model: Any) -> dict[str, list[float]]:
    """Return numbers of each floating-point buffer that does not belong to the state dict, evenly spaced."""
    if rotates_by_length(model.config):
        return {}
    found = {}
    for weight in weights_of(model):
        tensor = weight.tensor
        if (
            weight.persistent
            or tensor.is_meta
            or not tensor.is_floating_point()
            or not tensor.numel()
        ):
            continue
        count = min(tensor.numel(), BUFFER_NUMBERS)
        places = torch.linspace(0, tensor.numel() - 1, count, device=tensor.device).long()
        numbers = tensor.detach().reshape(-1)[places].double()
        if bool(numbers.isfinite().all()):
            found[weight.name] = [float(f"{number:.6g}") for number in numbers.tolist()]
    return found


def _check_buffers(theirs: Any, own: dict[str, list[float]]) -> None:
    """Raise RefusedError where a buffer that both models have holds other numbers. Files of earlier versions name none."""
    if not isinstance(theirs, dict):
        raise RefusedError(f"it says nothing about its model's buffers: {short(theirs)}")
    for name in [name for name in own if name in theirs]:
        numbers = theirs[name]
        if not isinstance(numbers, list) or not all(type(one) is float for one in numbers):
            raise RefusedError(f"its model's buffer {name} is {short(numbers)}")
        differs = any(
            not abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
            for one, other in zip(numbers, own[name], strict=False)
        )
        if differs and len(numbers) == len(own[name]):
            raise RefusedError(
                f"it was saved with other numbers in a buffer of the model: {name} differs"
            )


def _saved_weights(model: torch.nn.Module) -> list[Weight]:
    return [weight for weight in weights_of(model) if weight.persistent]


def _fingerprint(weights: list[Weight]) -> dict[str, Any]:
    structure = hashlib.sha256()
    for weight in weights:
        structure.update(f"{weight.name} {list(weight.tensor.shape)}\n".encode())
    dtypes = Counter(str(weight.tensor.dtype).removeprefix("torch.") for weight in weights)
    return {
        "structure": structure.hexdigest(),
        "dtypes": ", ".join(f"{dtype} x {count}" for dtype, count in sorted(dtypes.items())),
        "samples": "".join(
            UNREADABLE if digest is None else digest.hex()[:DIGITS]
            for _, digest in digests(weights)
        ),
    }
