"""By what a model is known: its adapters, its weights, and everything else that decides its keys and values.

peft's tuner layers say themselves what they add, so that peft need not be imported: their class lists under
`adapter_layer_names` the containers of an adapter's tensors and under `other_param_names` those of its settings, each of
them keyed by the adapter's name. Tensors of adapters that are not active, or merged, are left out.

Of weights samples are compared. A tensor of up to WHOLE numbers is read whole. Of a larger one, seen as a matrix of its last
dimension, at least one number of each row is read, and of each column if there are that many rows:

    row 0   x . . . . x        storage order, every `step`-th number; step < columns, so that no row is passed over,
    row 1   . . . . x .        and without a common divisor with columns, so that the samples wander through all of them
    row 2   . . . x . .

A file keeps the sizes that caches are told apart by, the decoder's config, the adapters, dtype, shape and a digest of the
samples of each weight (by name and shape only where it cannot be read), and numbers of the buffers that a checkpoint does
not hold (rotary frequencies). Each model computes these anew, on whatever device: they are compared with a tolerance, where
both have them. Those that forwards change with the length of the text are left out.
"""

import hashlib
import json
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from ..errors import CacheFileError
from ..printable import short
from .model_shape import decoder_config, rotates_by_length, signature


@dataclass(frozen=True)
class Adapters:
    """The state of a model's adapters at one moment.

    Attributes:
        active: names of the adapters that forwards add, sorted; without those that are merged or disabled.
        merged: names of the adapters that are merged into the weights.
        disabled: whether layers with adapters leave them out.
        scaling: scaling factors of the active adapters, for people.
        settings: hexadecimal digest of all settings of the active adapters in all layers; "" without any.
        virtual: kind and name of the virtual tokens in front of each prompt, "" without.
        by_call: whether hooks choose adapters for each row or token of the current call.
    """

    active: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    disabled: bool = False
    scaling: str = ""
    settings: str = ""
    virtual: str = ""
    by_call: bool = False

    def effective(self) -> "Adapters":
        """Return what keys and values depend on beside the weights: that adapters are merged, the weights say."""
        return Adapters(self.active, (), False, self.scaling, self.settings, self.virtual, self.by_call)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as plain JSON."""
        return {**asdict(self), "active": list(self.active), "merged": list(self.merged)}

    @classmethod
    def from_json(cls, given: Any) -> "Adapters | None":
        """Return what `to_json` returned, or None for anything else."""
        default = cls().to_json()
        if not isinstance(given, dict) or set(given) != set(default):
            return None
        if any(type(given[name]) is not type(value) for name, value in default.items()):
            return None
        names = [*given["active"], *given["merged"]]
        if not all(isinstance(name, str) for name in names):
            return None
        return cls(**{**given, "active": tuple(given["active"]), "merged": tuple(given["merged"])})

    def __str__(self) -> str:
        found = []
        if self.active:
            found.append(f"{_named(self.active)} active")
            found[-1] += f" (scaling {self.scaling})" if self.scaling else ""
        if self.by_call:
            found.append("adapters chosen for each row")
        if self.virtual:
            found.append(f"virtual tokens of {self.virtual}")
        if self.disabled:
            found.append("adapters disabled")
        if self.merged:
            found.append(f"{_named(self.merged)} merged")
        return ", ".join(found) or "no adapter"


def _named(names: tuple[str, ...]) -> str:
    return f"adapter{'s' if len(names) > 1 else ''} {' + '.join(map(repr, names))}"


def without_adapters(model: Any) -> Any:
    """Return the transformers model inside of a peft one, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters_of(model: Any) -> Adapters:
    """Return what adapters do in `model`, a transformers model or a peft one around it, right now."""
    names: set[str] = set()
    merged: set[str] = set()
    disabled = by_call = False
    scaling: set[float] = set()
    digest = hashlib.sha256()
    for place, layer in enumerate(tuner_layers(model)):
        merged.update(layer.merged_adapters)
        disabled |= bool(layer.disable_adapters)
        by_call |= bool(layer._forward_pre_hooks)
        for name in active_in(layer):
            names.add(name)
            settings = _settings(layer, name)
            factor = settings.get("scaling")
            scaling |= {factor} if isinstance(factor, float | int) else set()
            digest.update(json.dumps([place, name, settings], sort_keys=True).encode())
    ends = sorted({min(scaling), max(scaling)}) if scaling else []
    owner = virtual_owner(model)
    return Adapters(
        tuple(sorted(names)),
        tuple(sorted(merged)),
        disabled,
        " to ".join(f"{end:.6g}" for end in ends),
        digest.hexdigest() if names else "",
        "" if owner is None else _virtual(owner),
        by_call,
    )


def tuner_layers(model: Any) -> Iterator[Any]:
    """Yield the layers of `model` that peft has put adapters into."""
    if "peft" not in sys.modules:  # these layers are of its classes: nothing to look for
        return
    for module in without_adapters(model).modules():
        if hasattr(type(module), "adapter_layer_names"):
            yield module


def active_in(layer: Any) -> list[str]:
    """Return the adapters that a forward of one tuner layer adds to the layer's own weights."""
    if layer.disable_adapters:
        return []
    held = {name for container in _containers(layer) for name in container}
    given = layer.active_adapters
    return [name for name in given if name in held and name not in layer.merged_adapters]


def idle_parts(model: Any) -> tuple[set[int], set[tuple[int, str]]]:
    """Return what belongs to adapters that forwards leave out: ids of modules, and (id of module, tensor's name)."""
    modules: set[int] = set()
    tensors: set[tuple[int, str]] = set()
    for layer in tuner_layers(model):
        used = active_in(layer)
        for container in _containers(layer):
            for name in container:
                part = container[name]
                if name in used:
                    continue
                if isinstance(part, torch.nn.Module):
                    modules.update(map(id, part.modules()))
                else:
                    tensors.add((id(container), name))
    return modules, tensors


def virtual_owner(model: Any) -> Any:
    """Return the peft model that puts virtual tokens in front of each prompt of `model`; None without one.

    While generate() runs, `model` is the transformers model, and its inputs are prepared by the peft one.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    for owner in (getattr(prepare, "__self__", None), model):
        config = getattr(owner, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            return None if getattr(owner, "_adapters_disabled", False) else owner
    return None


def virtual_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the virtual tokens of a peft model are computed from, by their names.

    Returns: parameters of the active adapter's prompt encoder, of its own shapes (for prompt tuning one table
        [virtual tokens, hidden]); empty where the model has no virtual tokens.
    """
    owner = virtual_owner(model)
    encoder = None if owner is None else getattr(owner, "prompt_encoder", {})
    if not encoder or owner.active_adapter not in encoder:
        return {}
    found = encoder[owner.active_adapter].named_parameters()
    return {f"prompt_encoder.{owner.active_adapter}.{name}": tensor for name, tensor in found}


def _virtual(owner: Any) -> str:
    kind = str(owner.active_peft_config.peft_type).rpartition(".")[2].lower().replace("_", " ")
    return f"{kind} {owner.active_adapter!r} ({owner.active_peft_config.num_virtual_tokens})"


def _containers(layer: Any) -> Iterator[Any]:
    """Yield what a tuner layer keeps by adapter's name and that holds tensors."""
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        found = getattr(layer, attribute, None)
        if isinstance(found, torch.nn.Module) and hasattr(found, "keys"):
            yield found


def _settings(layer: Any, name: str) -> dict[str, Any]:
    """Return the settings of one adapter in one layer: plain values alone."""
    found = {}
    for attribute in layer.other_param_names:
        kept = getattr(layer, attribute, None)
        value = kept.get(name) if isinstance(kept, dict) else None
        if isinstance(value, bool | int | float | str):
            found[attribute] = value
    return found


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


# model -> (where its weights lay and how often they had been written to, mark)
_marks: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def model_mark(model: Any) -> str | None:
    """Return the fingerprint of the numbers of a model's weights; equal for equal weights, wherever they lie.

    Weights are read when a model is first asked, and again once they were moved or written to. Otherwise this looks at
    addresses and counters: a GPU is not asked.

    Returns: hexadecimal digits; None where weights cannot be told: adapters are in the model (the cache notes them by
        themselves), processes share the weights, or some lie outside of memory.
    """
    weights = list(model.parameters())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    if any(weight.is_meta for weight in weights) or any(True for _ in tuner_layers(model)):
        return None
    written = hash(tuple(map(_written, weights)))
    found = _marks.get(model)
    if found is None or found[0] != written:
        kept = [weight for weight in weights_of(model) if weight.persistent]
        found = (written, fingerprint(kept, places=False).hex())
        _marks[model] = found
    return found[1]


def _written(weight: torch.Tensor) -> tuple[int, int]:
    """Return where a weight lies and how often it was written to."""
    try:
        return weight.data_ptr(), -1 if weight.is_inference() else weight._version
    except RuntimeError:  # a kind of tensor without an address
        return id(weight), -1


@dataclass(frozen=True)
class ModelState:
    """Everything besides tokens that decides a model's keys and values, within this process.

    Attributes:
        space: hexadecimal digest of adapters, hooks, autocast and dropout: what is switched to and fro.
        weights: fingerprint of the weights, see weights.fingerprint: what changes for good.
    """

    space: str
    weights: bytes


def model_state(model: Any) -> ModelState:
    """Return the state of `model` at this moment. Takes some milliseconds: once per generate(), not per step."""
    adapters = adapters_of(model)
    parts = (adapters, _hooks(model), _autocast(model), drops_numbers(model))
    space = hashlib.sha256(repr(parts).encode()).hexdigest()
    return ModelState(space, fingerprint(weights_of(model)))


def _hooks(model: Any) -> list[tuple[str, int]]:
    """Return where hooks are registered, and their numbers, which no other hook of this process ever has.

    Those of all modules ("register_module_forward_hook") come first.
    """
    every = torch.nn.modules.module
    found = [
        ("all modules", every._global_forward_pre_hooks),
        ("all modules", every._global_forward_hooks),
    ]
    for name, module in without_adapters(model).named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            found += [(name, module._forward_pre_hooks), (name, module._forward_hooks)]
    return [
        (name, number)
        for name, hooks in found
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.")
    ]


def drops_numbers(model: Any) -> bool:
    """Say whether forwards of `model` drop numbers at random, so that equal tokens get other keys and values each time.

    In training mode it does where a dropout layer, or a number of a module or of the config that is named after dropout
    (Llama's `attention_dropout`), is more than zero.
    """
    parts = [part for part in model.modules() if part.training]
    if not parts:
        return False
    if any(isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p for part in parts):
        return True
    configs = [
        vars(part.config) for part in parts if hasattr(getattr(part, "config", None), "to_dict")
    ]
    return any(
        "drop" in name and isinstance(value, int | float) and value > 0
        for values in (*map(vars, parts), *configs)
        for name, value in values.items()
    )


def _autocast(model: Any) -> str:
    """Return the dtype that operations of the model are cast to, "" without autocast."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return ""
    return str(torch.get_autocast_dtype(kind))
