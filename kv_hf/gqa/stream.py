"""Run the layers of a checkpoint one by one, on calibration text, and observe what attention sees.

The model is loaded in the dtype of its files, which the operating system maps. The embeddings are kept in float32, and a layer
is copied to float32 while it runs.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ConversionError, first_line
from ..texts import longest_context, text_windows
from .source import Source
from .structure import Structure, model_class

NAME = "kv_hf_calibration"
OFF = 1e-4  # that a context may be off the weighted sum of values, as a part of the largest
WINDOW, TOKENS = 512, 8192
_calls: list[dict[str, Any]] = []  # what attention got and gave, the fields of Seen


@dataclass
class Seen:
    """One window's run of a layer.

    Attributes:
        query: [heads, tokens, head_dim], rotated and normed.
        key, value: [kv heads, tokens, head_dim].
        weights: [heads, tokens, tokens], what each value counts for.
        context: [tokens, heads, head_dim], the weighted sums of values.
        hidden: [tokens, hidden], behind the layer.
        linears: path -> (input, output) of each linear layer of attention, [tokens, ..].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor
    context: torch.Tensor
    hidden: torch.Tensor
    linears: dict[str, tuple[torch.Tensor, torch.Tensor]]


def observed_attention(
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
    kind = type(module).__name__
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ConversionError(f"{kind} has no eager attention, so that it cannot be calibrated")
    context, weights = eager(module, query, key, value, attention_mask, **kwargs)
    each = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    sums = (weights @ each).transpose(1, 2)
    room = OFF * context.abs().max()
    if sums.shape != context.shape or bool((sums - context).abs().max() > room):
        raise ConversionError(
            f"{kind} makes something else of its values than sums weighted by probabilities, so that it cannot be calibrated; "
            'use method="mean"'
        )
    rows = {"query": query, "key": key, "value": value, "weights": weights, "context": context}
    _calls.append({name: found[0] for name, found in rows.items()})
    return context, weights


def calibration_windows(
    source: Source, structure: Structure, text: str | Path | torch.Tensor
) -> torch.Tensor:
    """Return what to calibrate on as token ids [windows, tokens], int64.

    Args:
        text: token ids [windows, tokens], or text as kv_hf.texts.load_text takes it, whose first 8,192 tokens are cut into
            windows of 512 (fewer for models with a shorter context), each begun as the tokenizer begins texts.
    Raises: ConversionError where there is no such text, no tokenizer beside the weights, too few tokens, or ids that the
        model does not know.
    """
    windows = text if isinstance(text, torch.Tensor) else _read_text(source, structure, text)
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


def _read_text(source: Source, structure: Structure, text: str | Path) -> torch.Tensor:
    length, load = min(WINDOW, longest_context(structure.config)), transformers.AutoTokenizer
    try:
        tokenizer = load.from_pretrained(source.folder, trust_remote_code=False)
        return torch.tensor(text_windows(tokenizer, text, length, TOKENS // length))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConversionError(
            f"calibration {str(text)!r} cannot be read with the tokenizer of {source.folder}: {first_line(error)}"
        ) from error


class LayerStream:
    """Runs windows of tokens through a model's layers, layer by layer.

    Attributes:
        model: the model, in the dtype of its files.
        names: names in the model of the tensors that change.
        path: of the list of layers in the model, such as "model.layers".
        layers: the list.
        calls: for each window what each layer is called with behind its hidden states.
    """

    def __init__(self, source: Source, structure: Structure) -> None:
        self.structure = structure
        config = copy.deepcopy(structure.config)
        floats = {t.dtype for t in source.tensors.values() if t.dtype.is_floating_point}
        dtype = reduce(torch.promote_types, floats)
        # the config may name a kernel of the hub, which would be fetched and run
        options = {"dtype": dtype, "attn_implementation": "eager", "use_safetensors": True}
        loaded = model_class(config).from_pretrained(source.folder, config=config, **options)
        self.model: Any = loaded.eval().requires_grad_(False)
        ALL_ATTENTION_FUNCTIONS.register(NAME, observed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
        for module in self.model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation_internal = NAME
        self.names = {
            own for own, name in structure.names.on_disk.items() if name in structure.parts
        }
        self.path = _layers_path(self.model, self.names)
        self.layers = self.model.get_submodule(self.path)
        self.calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []

    @contextmanager
    def loaded(self, index: int) -> Iterator[str]:
        """Have a layer in float32 for as long as the block lasts, whose path is given; changes to it are lost behind it."""
        kept = self.layers[index]
        self.layers[index] = copy.deepcopy(kept).float()
        try:
            yield f"{self.path}.{index}"
        finally:
            self.layers[index] = kept

    def embed(self, windows: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets, [n, tokens, hidden] in float32, and learn what all layers are called with.

        Args:
            windows: [n, tokens], int64.
        Raises: ConversionError for models that leave layers out when they read text alone.
        """
        base_path, _, name = self.path.rpartition(".")
        base = self.model.get_submodule(base_path)
        stubs = [_Stub(layer) for layer in self.layers]
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
                    f"{type(self.model).__name__} leaves layer {calls.index(None)} out when it reads text alone, so that it "
                    'cannot be calibrated; use method="mean"'
                )
            self.calls.append(calls)  # type: ignore[arg-type]
        setattr(base, name, self.layers)
        return torch.stack(found)

    def run(self, index: int, window: int, hidden: torch.Tensor) -> torch.Tensor:
        """Run a layer on a window's hidden states [tokens, hidden] and return those behind it."""
        args, kwargs = self.calls[window][index]
        out = self.layers[index](hidden[None], *args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def observe(
        self,
        index: int,
        window: int,
        hidden: torch.Tensor,
        attention: str,
        change: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> Seen:
        """Run a layer and return what was seen.

        Args:
            hidden: [tokens, hidden].
            attention: path of the attention module, whose linear layers are observed.
            change: (path of a linear layer, its output [1, tokens, ..]) -> the output that goes on.
        Raises: ConversionError where attention cannot be observed.
        """
        linears: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        def hook(path: str, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            output = output if change is None else change(path, output)
            linears[path] = args[0][0], output[0]
            return output

        handles = [
            module.register_forward_hook(partial(hook, f"{attention}.{name}"))
            for name, module in self.model.get_submodule(attention).named_modules()
            if isinstance(module, nn.Linear)
        ]
        _calls.clear()
        try:
            behind = self.run(index, window, hidden)
        finally:
            for handle in handles:
                handle.remove()
        if not _calls:
            raise ConversionError(
                "the attention of this model does not go through transformers' attention interface, so that it cannot be "
                'calibrated; use method="mean"'
            )
        return Seen(**_calls.pop(), hidden=behind, linears=linears)


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


def _layers_path(model: nn.Module, names: Iterable[str]) -> str:
    """Return the path of the list of layers that tensors of these names lie in."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = {min((p for p in lists if n.startswith(f"{p}.")), key=len, default="") for n in names}
    if len(found) != 1:
        raise ConversionError(f"{type(model).__name__} has several lists of layers: {found}")
    return found.pop()
