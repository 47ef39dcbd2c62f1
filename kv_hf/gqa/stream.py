"""Run the layers of a checkpoint and of its conversion one by one, on calibration text, and note what their parts get and give.

The checkpoint is loaded in the dtype of its files, which the operating system maps. The conversion is built without memory:
its layers run on tensors that are given.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ConversionError, first_line
from ..texts import longest_context, text_windows
from .source import Source
from .structure import Structure, build, config_of, model_class

NAME = "kv_hf_calibration"
WINDOW, TOKENS = 512, 8192
Call = tuple[tuple[Any, ...], dict[str, Any]]
Tensors = dict[str, Tensor]
_keys: list[Tensor] = []


@dataclass
class Seen:
    """What parts of a module did, in the order in which they ran.

    Attributes:
        calls, results: path -> its arguments, and what it gave.
        keys: [rows, kv heads, tokens, head_dim] of each call of transformers' attention interface.
    """

    calls: dict[str, Call]
    results: dict[str, Any]
    keys: list[Tensor]


def observed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Attend as the module's own eager attention does, and note the keys [rows, kv heads, tokens, head_dim]."""
    _keys.append(key)
    eager: Any = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return eager(module, query, key, value, attention_mask, **kwargs)


@contextmanager
def observed(module: nn.Module, paths: Iterable[str]) -> Iterator[Seen]:
    """Note what these parts of a module do in the block."""
    _keys.clear()
    seen = Seen({}, {}, _keys)

    def note(path: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.calls[path], seen.results[path] = (args, kwargs), output

    hooks = []
    for path in paths:
        part = module.get_submodule(path)
        hooks.append(part.register_forward_hook(partial(note, path), with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def run(module: nn.Module, tensors: Tensors, call: Call) -> Tensor:
    """Return what a layer or its attention computes with these tensors, by name in the module: [tokens, hidden]."""
    return first_row(functional_call(module, tensors, *call))


def first_row(out: Any) -> Tensor:
    """Return the hidden states [tokens, hidden] of what a module gave for one window."""
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states[0]


def calibration_windows(source: Source, structure: Structure, text: str | Path | Tensor) -> Tensor:
    """Return what to calibrate on as token ids [windows, tokens], int64.

    Args:
        text: token ids [windows, tokens], or text as kv_hf.texts.load_text takes it, whose first 8,192 tokens are cut into
            windows of 512 (fewer for models with a shorter context), each begun as the tokenizer begins texts.
    Raises: ConversionError where there is no such text, no tokenizer beside the weights, too few tokens, or ids that the
        model does not know.
    """
    windows = text if isinstance(text, Tensor) else _read_text(source, structure, text)
    few = windows.numel() < structure.head_dim
    if windows.dim() != 2 or windows.dtype != torch.int64 or windows.shape[1] < 2 or few:
        raise ConversionError(
            f"calibration must be text, or int64 token ids [windows, tokens], thousands in windows of hundreds, of at least "
            f"{structure.head_dim} for heads of as many channels; got {list(windows.shape)} of {windows.dtype}"
        )
    known = structure.config.get_text_config(decoder=True).vocab_size
    if bool(((windows < 0) | (windows >= known)).any()):
        raise ConversionError(
            f"calibration must hold token ids from 0 to {known - 1}, got {int(windows.min())} to {int(windows.max())}"
        )
    return windows


def _read_text(source: Source, structure: Structure, text: str | Path) -> Tensor:
    length, load = min(WINDOW, longest_context(structure.config)), transformers.AutoTokenizer
    try:
        tokenizer = load.from_pretrained(source.folder, trust_remote_code=False)
        return torch.tensor(text_windows(tokenizer, text, length, TOKENS // length), device="cpu")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConversionError(
            f"calibration {str(text)!r} cannot be read with the tokenizer of {source.folder}: {first_line(error)}"
        ) from error


class LayerStream:
    """Runs windows of tokens through the layers of a model and of its conversion.

    Attributes:
        models: the model in the dtype of its files, and its conversion on the meta device.
        names: names in the model of the tensors that change.
        path: of the list of layers in both, such as "model.layers".
        calls: for each window what each layer is called with behind its hidden states.
    """

    def __init__(self, source: Source, structure: Structure) -> None:
        config = structure.config
        floats = {t.dtype for t in source.tensors.values() if t.dtype.is_floating_point}
        dtype = reduce(torch.promote_types, floats)
        # the config may name a kernel of the hub, which would be fetched and run
        options = {"dtype": dtype, "attn_implementation": "eager", "use_safetensors": True}
        loaded = model_class(config).from_pretrained(source.folder, config=config, **options)
        new = build(config_of(structure.new_json, source))
        self.models: tuple[Any, Any] = loaded.eval().requires_grad_(False), new
        ALL_ATTENTION_FUNCTIONS.register(NAME, observed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
        for module in (*loaded.modules(), *new.modules()):
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation_internal = NAME
        on_disk = structure.names.on_disk
        self.names = {own for own, name in on_disk.items() if name in structure.parts}
        paths = {re.split(r"\.\d+\.", name, maxsplit=1)[0] for name in self.names}
        if len(paths) > 1:
            raise ConversionError(f"{type(loaded).__name__} has several lists of layers: {paths}")
        self.path = paths.pop()
        self.calls: list[list[Call]] = []

    def layers(self, index: int) -> tuple[nn.Module, nn.Module]:
        """Return a layer of the model, and the one of the conversion."""
        old, new = (model.get_submodule(f"{self.path}.{index}") for model in self.models)
        return old, new

    def tensors(self, index: int) -> Tensors:
        """Return what a layer of the model is made of, by name within it: copies in float32, or the tensors if they are."""
        layer, _ = self.layers(index)
        named = (*layer.named_parameters(), *layer.named_buffers())
        found = dict(named)
        for name, tensor in found.items():
            if tensor.is_floating_point():
                found[name] = tensor.float()
        return found

    def call(self, index: int, window: int, hidden: Tensor) -> Call:
        """Return what a layer is called with for a window's hidden states [tokens, hidden]."""
        args, kwargs = self.calls[window][index]
        return (hidden[None], *args), kwargs

    def embed(self, windows: Tensor) -> Tensor:
        """Return what the first layer gets, [n, tokens, hidden] in float32, and learn what all layers are called with.

        Args:
            windows: [n, tokens], int64.
        Raises: ConversionError for models that leave layers out when they read text alone.
        """
        model = self.models[0]
        base_path, _, name = self.path.rpartition(".")
        base, layers = model.get_submodule(base_path), model.get_submodule(self.path)
        stubs = [_Stub(layer) for layer in layers]
        setattr(base, name, nn.ModuleList(stubs))
        base.float()  # all but the layers, of which only stubs are there
        found = []
        for window in windows:
            for stub in stubs:
                stub.call = None
            base(input_ids=window[None], use_cache=False)
            found.append(stubs[0].hidden[0])
            calls = [stub.call for stub in stubs]
            if None in calls:  # such as layers that read images only
                raise ConversionError(
                    f"{type(model).__name__} leaves layer {calls.index(None)} out when it reads text alone, so that it "
                    'cannot be calibrated; use method="mean"'
                )
            self.calls.append(calls)  # type: ignore[arg-type]
        setattr(base, name, layers)
        return torch.stack(found)


class _Stub(nn.Module):
    """Takes the place of a layer: remembers what it was called with and passes the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule: it must not be found twice
        self.hidden = torch.empty(0, device="cpu")
        self.call: Call | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = args, kwargs
        # a model whose layers answer with tuples takes the first part of the answer, here the first row
        self.hidden = hidden if hidden.dim() == 3 else hidden[None]
        return self.hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)  # the model may ask a layer for its type
