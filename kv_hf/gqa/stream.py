"""Calibration: windows of text, and the decoder layers of a checkpoint, one in memory at a time, with what attention sees.

The model is built without memory; a layer's weights are read when it is its turn. Where names on disk are not those of the
class (fused experts), the whole model is loaded instead, and said so.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ConversionError, first_line
from ..notices import say_once
from ..texts import longest_context, text_windows
from .source import Source
from .structure import Structure, build, text_config

NAME = "kv_hf_calibration"
OFF = 1e-4  # that a context may be off the weighted sum of values, as a part of the sum of sizes
_last: list["Tap"] = []
_looking: list[bool] = []


class Enough(Exception):
    """Ends a run of a layer of which no more is needed."""


@contextmanager
def looking() -> Iterator[None]:
    """End every run at attention: for questions to what it gets, not to what it gives."""
    _looking.append(True)
    try:
        yield
    finally:
        _looking.pop()


@dataclass(frozen=True)
class Tap:
    """One call of attention.

    Attributes:
        query: [batch, num_heads, tokens, head_dim], rotated and normed.
        key, value: [batch, num_kv_heads, tokens, head_dim].
        context: [batch, tokens, num_heads, value_dim].
        weights: [batch, num_heads, tokens, tokens], what each value counts for in `context`: the probabilities, times
            whatever attention scales a token's context of a head by.
        scaling: of the scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: torch.Tensor
    weights: torch.Tensor
    scaling: float


def take() -> Tap:
    """Return the last call of attention and forget it. Raises ConversionError where there was none."""
    if not _last:
        raise ConversionError(
            "the attention of this model does not go through transformers' attention interface, so that it cannot be "
            'calibrated; use method="mean"'
        )
    found = _last.pop()
    _last.clear()
    return found


def tapped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as the module's own eager attention does, and remember the call.

    Args:
        query: [rows, heads, tokens, head_dim]; key, value: [rows, kv heads, tokens, ..].
    Returns: the context [rows, tokens, heads, value_dim] and the probabilities [rows, heads, tokens, tokens].
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ConversionError(
            f"{type(module).__name__} has no eager attention, so that it cannot be calibrated"
        )

    if _looking:
        _last[:] = [Tap(query, key, value, query, query, 1.0)]
        raise Enough
    context, weights = eager(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    read = read_weights(weights, value, context)
    if read is None:
        raise ConversionError(
            f"{type(module).__name__} makes something else of its values than sums weighted by probabilities, so that it "
            'cannot be calibrated; use method="mean"'
        )
    _last[:] = [Tap(query, key, value, context, read, scaling)]
    return context, weights


def read_weights(
    weights: torch.Tensor | None, value: torch.Tensor, context: torch.Tensor
) -> torch.Tensor | None:
    """Return `weights` [rows, heads, tokens, tokens], or a multiple for each token and head, with which values sum up to `context`.

    Attention with sinks may scale its contexts behind the sum. Shapes as in Tap. None where there are no such weights.
    """
    if weights is None or weights.dim() != 4 or weights.shape[1] % value.shape[1]:
        return None
    each = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    wanted = context.transpose(1, 2)
    if weights.shape[3] != each.shape[2] or wanted.shape[:3] != weights.shape[:3]:
        return None
    if wanted.shape[3] != each.shape[3]:
        return None
    plain = weights @ each
    if torch.equal(plain, wanted) or not wanted.isfinite().all():
        return weights  # what is not finite is an error of its own
    room = OFF * (weights @ each.abs())  # of rounding
    if bool(((plain - wanted).abs() <= room).all()):
        return weights
    scale = (plain * wanted).sum(-1, keepdim=True)
    scale = scale / plain.square().sum(-1, keepdim=True).clamp(min=1e-30)
    if bool(((scale * plain - wanted).abs() <= room * scale.abs().clamp(min=1)).all()):
        return scale * weights
    return None


def tap_model(model: torch.nn.Module) -> None:
    """Have every attention layer of `model` attend through `tapped_attention`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, tapped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = NAME


WINDOW, TOKENS = 512, 8192


def calibration_windows(
    source: Source, structure: Structure, text: str | Path | torch.Tensor
) -> torch.Tensor:
    """Return what to calibrate on as token ids [windows, tokens], int64.

    Args:
        text: token ids [windows, tokens], or text as kv_hf.texts.load_text takes it, whose first 8,192 tokens are cut into
            windows of 512 (fewer for models with a shorter context), each begun as the tokenizer begins texts.
    Raises: ConversionError where there is no such text, or no tokenizer beside the weights.
    """
    if isinstance(text, torch.Tensor):
        if text.dim() != 2 or not text.numel() or text.dtype != torch.int64:
            raise ConversionError(
                f"calibration must be text or int64 token ids [windows, tokens], got {list(text.shape)} of {text.dtype}"
            )
        return checked(text, structure)
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=False
        )
        why = None if len(tokenizer) else "its vocabulary is empty"
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = first_line(error)
    if why is not None:
        raise ConversionError(f"{source.folder} has no tokenizer to read text with: {why}")
    length = min(WINDOW, longest_context(structure.config))
    try:
        found = torch.tensor(text_windows(tokenizer, text, length, TOKENS // length))
    except ValueError as error:
        raise ConversionError(f"calibration: {error}") from error
    return checked(found, structure)


def checked(windows: torch.Tensor, structure: Structure) -> torch.Tensor:
    """Return token ids [windows, tokens]. Raises ConversionError for too few of them, and ids that the model does not know."""
    count, tokens = windows.shape
    if tokens < 2 or windows.numel() < structure.head_dim:
        raise ConversionError(
            f"calibration has {count} windows of {tokens} tokens: too few to merge heads of {structure.head_dim} channels on; "
            "several thousand in windows of hundreds are of use"
        )
    known = getattr(text_config(structure.config), "vocab_size", None)
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or (known is not None and high >= known):
        raise ConversionError(
            f"calibration holds token {low if low < 0 else high}, and the model's vocabulary has {known} tokens"
        )
    return windows


class LayerStream:
    """Runs tokens through a model's layers, layer by layer.

    Attributes:
        path: of the list of layers in the model, such as "model.layers".
        model: the model; its weights are on the meta device but for what is in use.
        count: layers.
    """

    def __init__(self, source: Source, structure: Structure) -> None:
        self.source, self.structure = source, structure
        self.model = build(structure.config)
        kind, on_disk = type(self.model), structure.names.on_disk
        tied = getattr(self.model, "all_tied_weights_keys", None) or ()
        self.whole = any(own not in on_disk and own not in tied for own in self.model.state_dict())
        if self.whole:
            say_once(
                f"calibrate-whole:{kind.__name__}",
                f"{kind.__name__}: names on disk are not those of the class, so the whole model is loaded to calibrate it",
            )
            self.model = kind.from_pretrained(
                source.folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.model.requires_grad_(False)
        tap_model(self.model)
        self.path = _layers_path(self.model, self.own_names())
        self.layers = self.model.get_submodule(self.path)
        self.count = len(self.layers)
        self.inputs: list[Any] = []  # what each layer is called with behind its hidden states

    def own_names(self) -> list[str]:
        """Return the names in the class of the tensors that change."""
        on_disk = self.structure.names.on_disk
        return [own for own, name in on_disk.items() if name in self.structure.changed]

    def changes(self, index: int) -> bool:
        """Return whether a layer holds tensors that change."""
        return any(own.startswith(f"{self.path}.{index}.") for own in self.own_names())

    @contextmanager
    def loaded(self, path: str) -> Iterator[nn.Module]:
        """Give a part of the model its weights in float32 for as long as the block lasts; other buffers are a new model's."""
        module = self.model.get_submodule(path)
        if self.whole:
            yield module
            return
        stored = set(module.state_dict())
        module.to_empty(device="cpu")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in stored:
                own = self.structure.names.on_disk[f"{path}.{name}"]
                tensor.data = self.source.read(own).to(torch.float32)
                tensor._is_hf_initialized = True
        for part in module.modules():
            if any(name in part._non_persistent_buffers_set for name in part._buffers):
                self.model._init_weights(part)
        try:
            yield module
        finally:
            module.to("meta")

    @torch.no_grad()
    def embed(self, windows: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets, [n, tokens, hidden] in float32, and learn what all layers are called with.

        Args:
            windows: [n, tokens], int64.
        Raises: ConversionError for models whose layers get more of the text than their hidden states.
        """
        base_path, _, name = self.path.rpartition(".")
        base = self.model.get_submodule(base_path)
        stubs = [_Stub(layer) for layer in self.layers]
        found = []
        with ExitStack() as stack:
            for key, _ in base.named_children():
                if key != name:
                    stack.enter_context(self.loaded(f"{base_path}.{key}" if base_path else key))
            stack.callback(setattr, base, name, self.layers)
            setattr(base, name, nn.ModuleList(stubs))
            for i in range(len(windows)):
                base(input_ids=windows[i : i + 1], use_cache=False)
                found.append(stubs[0].hidden[0].float())
                calls = [stub.call for stub in stubs]
                if None in calls:  # such as layers that read images only
                    raise ConversionError(
                        f"{type(self.model).__name__} leaves layer {calls.index(None)} out when it reads text alone, so that "
                        'it cannot be calibrated; use method="mean"'
                    )
                if i == 0:
                    self.inputs = calls
                elif i == 1 and not _same(calls, self.inputs):
                    raise ConversionError(
                        f"the layers of {type(self.model).__name__} get more of a text than their hidden states, so that they "
                        "cannot be calibrated one by one"
                    )
        return torch.stack(found)

    @torch.no_grad()
    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Run a loaded layer: hidden states [batch, tokens, hidden] of it -> those behind it."""
        args, kwargs = self.inputs[index]
        out = self.layers[index](hidden, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


class _Stub(nn.Module):
    """Takes the place of a layer: remembers what it was called with and passes the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule: it must not be found twice
        self.hidden = torch.empty(0)
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.call = args, kwargs
        # a model whose layers answer with tuples takes the first part of the answer, here the first row
        self.hidden = hidden if hidden.dim() == 3 else hidden[None]
        return self.hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)  # the model may ask a layer for its type


def _layers_path(model: nn.Module, names: Sequence[str]) -> str:
    """Return the path of the list of layers that tensors of these names lie in."""
    found = set()
    for name in names:
        parts = name.split(".")
        for i in range(len(parts)):
            path = ".".join(parts[:i])
            if isinstance(model.get_submodule(path), nn.ModuleList):
                found.add(path)
                break
    if len(found) != 1:
        raise ConversionError(
            f"{type(model).__name__} has no single list of layers: {sorted(found)}"
        )
    return found.pop()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return True
