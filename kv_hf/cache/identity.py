"""By what a file knows the model that its keys and values came from. Compares; decides no more than that.

Five things are kept: the sizes that caches are told apart by, the decoder's config, the adapters that forwards add, dtype,
shape and a digest of samples of each weight (weights.sample: all numbers of small tensors, at least one of every row of
large ones), and numbers of the buffers that a checkpoint does not hold (rotary frequencies). Tensors of adapters that are
not active, or merged, are left out. Weights that cannot be read (meta tensors) are known by name and shape only.

Buffers that a checkpoint does not hold are computed anew by each model, on whatever device: they are compared as numbers,
with a tolerance, where both have them. Those that forwards change with the length of the text are left out.
"""

import json
from typing import Any

import torch

from ..errors import CacheFileError
from ..printable import short
from .adapters import Adapters, adapters_of
from .model_shape import decoder_config, rotates_by_length, signature
from .weights import digests, weights_of

DIGITS = 8  # hexadecimal digits per weight
UNREADABLE = "-"
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
        "weights": _weights(model),
        "buffers": _buffers(model),
    }
    return json.loads(json.dumps(found, default=str))


def check_identity(saved: Any, model: Any) -> None:
    """Raise CacheFileError, naming the first difference, unless `saved` is the identity of `model`.

    Names that only one of the two configs has are passed over: versions of transformers differ in them.
    """
    own = identity(model)
    for part in ("signature", "config", "weights", "buffers"):
        if not isinstance(saved.get(part), dict):
            raise CacheFileError(f"it says nothing about its model's {part}: {short(saved)}")
    for part in ("signature", "config"):
        theirs = saved[part]
        for name in [name for name in own[part] if name in theirs or part == "signature"]:
            if theirs.get(name) != own[part][name]:
                raise CacheFileError(
                    f"it was saved with a model of {name}={short(theirs.get(name))}, this model has "
                    f"{name}={short(own[part][name])}"
                )
    merged = _check_adapters(saved.get("adapters"), adapters_of(model))
    _check_weights(saved["weights"], own["weights"], merged)
    for name in own["buffers"].keys() & saved["buffers"].keys():
        if not _close(saved["buffers"][name], own["buffers"][name]):
            raise CacheFileError(
                f"it was saved with other numbers in a buffer of the model: {name} differs"
            )


def _check_adapters(saved: Any, own: Adapters) -> str:
    """Raise CacheFileError unless both add the same; return what is known of merged adapters, for other messages."""
    theirs = Adapters.from_json(saved)
    if theirs is None:
        raise CacheFileError(f"it says nothing about its model's adapters: {short(saved)}")
    if theirs.effective() != own.effective():
        same = str(theirs.effective()) == str(own.effective())
        rest = "; the settings of these adapters differ" if same else ""
        raise CacheFileError(
            f"it was saved with {str(theirs)[:200]}, this model has {str(own)[:200]}{rest}"
        )
    if theirs.merged == own.merged:
        return ""
    return f" (adapters merged into them: {short(theirs.merged)} there, {short(own.merged)} here)"


def _weights(model: Any) -> dict[str, str]:
    """Return "<dtype> <shape> <digest>" of each parameter and persistent buffer."""
    kept = [weight for weight in weights_of(model) if weight.persistent]
    found = {}
    for weight, digest in digests(kept):
        dtype = str(weight.tensor.dtype).removeprefix("torch.")
        numbers = UNREADABLE if digest is None else digest.hex()[:DIGITS]
        found[weight.name] = f"{dtype} {list(weight.tensor.shape)} {numbers}"
    return found


def _check_weights(theirs: dict[str, Any], own: dict[str, str], merged: str) -> None:
    if theirs.keys() != own.keys():
        name = min(theirs.keys() ^ own.keys())
        raise CacheFileError(
            f"it was saved with a model of other parameters: only one of the two has {short(name)}"
        )
    for name, described in own.items():
        found = str(theirs[name])
        pair = [text.rpartition(" ") for text in (found, described)]
        readable = UNREADABLE not in (pair[0][2], pair[1][2])
        if pair[0][0] != pair[1][0] or (readable and found != described):
            raise CacheFileError(
                f"it was saved with other weights: {name} differs ({short(found)} there, {described} here){merged}"
            )


def _buffers(model: Any) -> dict[str, list[float]]:
    """Return numbers of each floating-point buffer that does not belong to the state dict, evenly spaced."""
    if rotates_by_length(model.config):
        return {}
    found = {}
    for weight in weights_of(model):
        tensor = weight.tensor
        if weight.persistent or tensor.is_meta or not tensor.is_floating_point():
            continue
        count = min(tensor.numel(), BUFFER_NUMBERS)
        places = torch.linspace(0, tensor.numel() - 1, count, device=tensor.device).long()
        numbers = tensor.detach().reshape(-1)[places].double()
        if bool(numbers.isfinite().all()):
            found[weight.name] = numbers.tolist()
    return found


def _close(theirs: Any, own: list[float]) -> bool:
    """Say whether numbers of a buffer are equal within what devices differ by."""
    try:
        found = torch.tensor(theirs, dtype=torch.float64, device="cpu")
        wanted = torch.tensor(own, dtype=torch.float64, device="cpu")
        return torch.allclose(found, wanted, rtol=TOLERANCE, atol=0)
    except (RuntimeError, TypeError, ValueError):  # other counts, no numbers
        return False
