"""By what a model is known: one ModelId, which generate(), prefix stores and saved caches compare.

peft's tuner layers say themselves what they add, so that peft need not be imported: their class lists under
`adapter_layer_names` the containers of an adapter's tensors and under `other_param_names` those of its settings, each of
them keyed by the adapter's name. Tensors of adapters that are not active, or merged, are left out.

Of weights samples are compared. A tensor of up to WHOLE numbers is read whole. Of a larger one, seen as a matrix of its last
dimension, at least one number of each row is read, and of each column if there are that many rows:

    row 0   x . . . . x        storage order, every `step`-th number; step < columns, so that no row is passed over,
    row 1   . . . . x .        and without a common divisor with columns, so that the samples wander through all of them
    row 2   . . . x . .

generate() reads them when a weight has another address or count of writes. Writing through `.data` changes neither, so a
store reads the samples each time.
"""

import hashlib
import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from ..printable import short
from .model_shape import decoder_config, modules_of, signature

WHOLE = 2**14
# parts of names that wrappers put in
WRAPPERS = {"base_layer", "original_module", "_orig_mod"}
# integers with the bits of numbers of a size in bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
DIGITS = 8  # hexadecimal digits per weight
UNREADABLE = "-"
# what may differ between two loads of one model without any effect on keys and values, besides what begins with "_"
IGNORED = {
    "architectures", "attn_implementation", "bos_token_id", "eos_token_id", "experts_implementation", "gradient_checkpointing",
    "id2label", "label2id", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "transformers_version", "use_cache",
    "dtype", "torch_dtype", "quantization_config",  # the weights say these
}  # fmt: skip


@dataclass(frozen=True)
class Adapters:
    """The state of a model's adapters at one moment.

    Attributes:
        active: names of the adapters that forwards add, sorted; without those that are disabled, or merged: the weights say that.
        settings: hexadecimal digest of all settings of the active adapters in all layers; "" without any.
        virtual: kind and name of the virtual tokens in front of each prompt, "" without.
        by_call: whether hooks choose adapters for each row or token of the current call.
    """

    active: tuple[str, ...] = ()
    settings: str = ""
    virtual: str = ""
    by_call: bool = False

    def __str__(self) -> str:
        names = " + ".join(map(repr, self.active))
        found = [
            f"adapter{'s' * (len(self.active) > 1)} {names} active" if names else "",
            "adapters chosen for each row" if self.by_call else "",
            f"virtual tokens of {self.virtual}" if self.virtual else "",
        ]
        return ", ".join(filter(None, found)) or "no adapter"


@dataclass(frozen=True)
class ModelId:
    """Everything besides tokens that decides a model's keys and values.

    Attributes:
        sizes: sizes and settings by name; of a file those of the whole config.
        adapters: None where they are not compared.
        weights: "<dtype> <shape> <digest>" of each weight by name; None where they cannot be told: adapters are in the model,
            processes share the weights, or some are not in memory.
    """

    sizes: dict[str, Any]
    adapters: Adapters | None = None
    weights: dict[str, str] | None = None

    @classmethod
    def of(cls, model: Any) -> "ModelId":
        """Return the id by which generate() compares models. A GPU is asked where weights have changed only."""
        return cls(signature(decoder_config(model.config)), adapters_of(model), _weights(model))

    @classmethod
    def for_file(cls, model: Any) -> "ModelId":
        """Return the id that another process compares, as plain JSON."""
        decoder = decoder_config(model.config)
        config = {
            name: value
            for name, value in decoder.to_dict().items()
            if name not in IGNORED and not name.startswith("_")
        }
        text = json.dumps({**signature(decoder), **config}, default=str)
        sizes = json.loads(text, parse_constant=str)  # inf, as Mamba's limits are, is no JSON
        weights = described(weight for weight in weights_of(model) if weight.persistent)
        return cls(sizes, adapters_of(model), weights)

    @classmethod
    def lasting(cls, model: Any) -> dict[str, Any] | None:
        """Return what other processes know the state of a model by, as plain JSON; None for a state that this process alone has.

        Hooks, adapters that are chosen for each row, dropout and weights that cannot be read are such.
        """
        own = cls.for_file(model)
        assert own.adapters is not None and own.weights is not None
        unread = any(one.endswith(f" {UNREADABLE}") for one in own.weights.values())
        if unread or own.adapters.by_call or _hooks(model) or drops_numbers(model):
            return None
        return {**vars(own), "adapters": repr(own.adapters), "cast": _autocast(model)}

    def difference(self, other: "ModelId") -> str | None:
        """Return in what the model of now, `other`, differs from this one, in words; None where keys and values are equal.

        Names of sizes that only one of the two has are passed over: versions of transformers differ in them.
        """
        for name, own in other.sizes.items():
            theirs = self.sizes.get(name, own)
            if theirs != own:
                return f"a model with {name}={short(theirs)}, this model has {name}={short(own)}"
        if None not in (self.adapters, other.adapters) and self.adapters != other.adapters:
            texts = [str(one)[:200] for one in (self.adapters, other.adapters)]
            rest = "; the settings of these adapters differ" * (texts[0] == texts[1])
            return f"{texts[0]}, this model has {texts[1]}{rest}"
        theirs, own = self.weights, other.weights
        if theirs is None or own is None or theirs == own:
            return None
        for name in sorted(theirs.keys() | own.keys()):
            both = [one.get(name, "none") for one in (theirs, own)]
            (kind, _, digest), (own_kind, _, own_digest) = (one.rpartition(" ") for one in both)
            unread = UNREADABLE in (digest, own_digest)  # then digests are not compared
            if kind != own_kind or (digest != own_digest and not unread):
                there, here = map(short, both)
                return f"other weights: {name} differs ({there} there, {here} here)"
        return None


# -- adapters ------------------------------------------------------------------------------------------------


def without_adapters(model: Any) -> Any:
    """Return the transformers model inside of a peft one, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters_of(model: Any) -> Adapters:
    """Return what adapters do in `model`, a transformers model or a peft one around it, right now."""
    names: set[str] = set()
    by_call = False
    digest = hashlib.sha256()
    for place, (_, layer) in enumerate(tuner_layers(model)):
        by_call |= bool(layer._forward_pre_hooks)
        for name in _active_in(layer):
            names.add(name)
            settings = [place, name, _settings(layer, name)]
            digest.update(json.dumps(settings, sort_keys=True).encode())
    owner = virtual_owner(model)
    return Adapters(
        tuple(sorted(names)),
        digest.hexdigest() if names else "",
        "" if owner is None else _virtual(owner),
        by_call,
    )


def tuner_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of `model` that peft has put adapters into, with their names."""
    if "peft" not in sys.modules:  # these layers are of its classes: nothing to look for
        return
    for path, module in without_adapters(model).named_modules():
        if hasattr(type(module), "adapter_layer_names"):
            yield path, module


def _active_in(layer: Any) -> list[str]:
    """Return the adapters that a forward of one tuner layer adds to the layer's own weights."""
    if layer.disable_adapters:
        return []
    held = {name for _, container in _containers(layer) for name in container}
    given = layer.active_adapters
    return [name for name in given if name in held and name not in layer.merged_adapters]


def _containers(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a tuner layer keeps by adapter's name and that holds tensors, by the attribute's name."""
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        found = getattr(layer, attribute, None)
        if isinstance(found, torch.nn.Module) and hasattr(found, "keys"):
            yield attribute, found


def _settings(layer: Any, name: str) -> dict[str, Any]:
    """Return the settings of one adapter in one layer: plain values alone."""
    kept = {attribute: getattr(layer, attribute, None) for attribute in layer.other_param_names}
    values = {key: one.get(name) for key, one in kept.items() if isinstance(one, dict)}
    return {key: value for key, value in values.items() if isinstance(value, int | float | str)}


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


def _virtual(owner: Any) -> str:
    kind = str(owner.active_peft_config.peft_type).rpartition(".")[2].lower().replace("_", " ")
    return f"{kind} {owner.active_adapter!r} ({owner.active_peft_config.num_virtual_tokens})"


# -- weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer.

    Attributes:
        name: its name without what wrappers add to it.
        tensor: the numbers; on the meta device where accelerate brings them in each forward.
        persistent: whether it belongs to the state dict.
    """

    name: str
    tensor: torch.Tensor
    persistent: bool = True


def weights_of(model: Any) -> list[Weight]:
    """Return all parameters and buffers that forwards of `model` use, in the order of their names, tied ones once.

    Those of adapters that are not active, or merged, are left out. Those from which virtual tokens are computed come along.
    """
    idle = tuple(
        f"{path}.{attribute}.{name}."
        for path, layer in tuner_layers(model)
        for attribute, container in _containers(layer)
        for name in set(container) - set(_active_in(layer))
    )
    found: dict[int, Weight] = {}
    for prefix, module in without_adapters(model).named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = f"{prefix}.{name}"
            if tensor is None or id(tensor) in found or f"{full}.".startswith(idle):
                continue
            path = ".".join(part for part in full.split(".") if part and part not in WRAPPERS)
            persistent = name not in module._non_persistent_buffers_set
            found[id(tensor)] = Weight(path, tensor, persistent)
    owner = virtual_owner(model)
    encoders = {} if owner is None else getattr(owner, "prompt_encoder", {})
    if owner is not None and owner.active_adapter in encoders:
        for name, tensor in encoders[owner.active_adapter].named_parameters():
            found[id(tensor)] = Weight(f"prompt_encoder.{owner.active_adapter}.{name}", tensor)
    return sorted(found.values(), key=lambda weight: weight.name)


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
    # below `columns`, no more than there are rows, without a common divisor with `columns`
    step = max(1, min(bits.numel() // columns, columns - 1))
    while gcd(step, columns) > 1:
        step -= 1
    return bits.reshape(-1)[::step]


def described(weights: Iterable[Weight], places: bool = False) -> dict[str, str]:
    """Return "<dtype> <shape> <digest of the samples>" of each weight by name, UNREADABLE for one that cannot be read.

    Args:
        places: add where weights lie and how often they were written to. Without it copies of a model are equal.
    """
    found = {}
    for weight in weights:
        parts, digest = list[torch.Tensor](), hashlib.sha256()
        try:
            parts = list(plain_parts(weight.tensor))
            for part in parts:
                digest.update(sample(part).cpu().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
            samples = digest.hexdigest()[:DIGITS]
        except Exception:
            # a kind of tensor that cannot be viewed must not stop a save; meta tensors
            samples = UNREADABLE
        words = [str(weight.tensor.dtype).removeprefix("torch."), str(list(weight.tensor.shape))]
        if places:
            words.append(str(list(map(_written, parts)) if weight.persistent else []))
        found[weight.name] = " ".join([*words, samples])
    return found


# model -> (where its weights lay and how often they had been written to, described)
_known: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, str]]] = weakref.WeakKeyDictionary()


def _weights(model: Any) -> dict[str, str] | None:
    """Return the weights of a ModelId, read again once they were moved or written to."""
    every = (one for module in modules_of(model) for one in module._parameters.values())
    weights = [weight for weight in every if weight is not None]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    if any(weight.is_meta for weight in weights) or any(True for _ in tuner_layers(model)):
        return None
    written = hash(tuple(map(_written, weights)))
    found = _known.get(model)
    if found is None or found[0] != written:
        found = written, described(one for one in weights_of(model) if one.persistent)
        _known[model] = found
    return found[1]


def _written(weight: torch.Tensor) -> tuple[int, int]:
    """Return where a weight lies and how often it was written to."""
    try:
        return weight.data_ptr(), -1 if weight.is_inference() else weight._version
    except RuntimeError:  # a kind of tensor without an address
        return id(weight), -1


# -- the state of a model within this process ---------------------------------------------------------------


def space_of(model: Any) -> str:
    """Return a digest of everything besides tokens that decides the keys and values of `model` now, for stores of this process.

    Samples of weights are read each time, which takes some milliseconds: once per generate().
    """
    switched = adapters_of(model), _hooks(model), _autocast(model), drops_numbers(model)
    state = (*switched, described(weights_of(model), places=True))
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _hooks(model: Any) -> list[tuple[str, int]]:
    """Return where hooks are registered, and their numbers, which no other hook of this process ever has.

    Those of all modules ("register_module_forward_hook") come first.
    """
    every = torch.nn.modules.module
    everywhere = every._global_forward_pre_hooks, every._global_forward_hooks
    found = [("all modules", hooks) for hooks in everywhere]
    for name, module in without_adapters(model).named_modules():
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
    for part in modules_of(model):
        if not part.training:
            continue
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p:
            return True
        config = getattr(part, "config", None)
        for name, value in (*vars(part).items(), *getattr(config, "__dict__", {}).items()):
            if "drop" in name and isinstance(value, int | float) and value > 0:
                return True
    return False


def _autocast(model: Any) -> str:
    """Return the dtype that operations of the model are cast to, "" without autocast."""
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return ""
    return str(torch.get_autocast_dtype(kind))
