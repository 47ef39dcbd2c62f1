"""The decoder layers of a checkpoint, one in memory at a time, and what they are called with.

The model is built without memory; a layer's weights are read when it is its turn. Where names on disk are not those of the
class (fused experts), the whole model is loaded instead, and said so.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import ConversionError
from ..notices import say_once
from .checkpoint import Checkpoint
from .heads import text_config
from .structure import Structure, model_class
from .taps import tap_model


class LayerStream:
    """Runs tokens through a model's layers, layer by layer.

    Attributes:
        path: of the list of layers in the model, such as "model.layers".
        model: the model; its weights are on the meta device but for what is in use.
        count: layers.
    """

    def __init__(self, checkpoint: Checkpoint, structure: Structure) -> None:
        self.checkpoint, self.structure = checkpoint, structure
        config = copy.deepcopy(structure.old)
        for part in (config, *_parts(config)):
            part._attn_implementation = "eager"
        kind = model_class(config)
        with torch.device("meta"):
            self.model = kind(config).eval()
        self.whole = structure.rebuilt
        if self.whole:
            say_once(
                f"calibrate-whole:{kind.__name__}",
                f"{kind.__name__}: names on disk are not those of the class, so the whole model is loaded to calibrate it",
            )
            self.model = kind.from_pretrained(
                checkpoint.folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.model.requires_grad_(False)
        tap_model(self.model)
        self.path = _layers_path(self.model, self.own_names())
        self.layers = self.model.get_submodule(self.path)
        self.count = len(self.layers)
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def own_names(self) -> list[str]:
        """Return the names in the class of the tensors that change."""
        changed = self.structure.changed
        return [own for own, name in self.structure.names.items() if name in changed]

    def changes(self, index: int) -> bool:
        """Return whether a layer holds tensors that change."""
        return any(own.startswith(f"{self.path}.{index}.") for own in self.own_names())

    def first_of_each_kind(self) -> list[int]:
        """Return the first layer of each kind among those that change: of one type, with tensors of the same names and shapes."""
        types = getattr(text_config(self.structure.old), "layer_types", None) or ()
        found: dict[Any, int] = {}
        for index, layer in enumerate(self.layers):
            if self.changes(index):
                shapes = tuple((name, tuple(t.shape)) for name, t in layer.state_dict().items())
                found.setdefault((types[index] if index < len(types) else "", shapes), index)
        return list(found.values())

    @contextmanager
    def loaded(self, module: nn.Module, path: str) -> Iterator[nn.Module]:
        """Give a part of the model its weights in float32 for as long as the block lasts."""
        if self.whole:
            yield module
            return
        self.fill(module, path)
        try:
            yield module
        finally:
            module.to("meta")

    @torch.no_grad()
    def fill(self, module: nn.Module, path: str) -> None:
        """Read the weights of a part of the model, in float32; other buffers get the values of a new model."""
        stored = set(module.state_dict())
        module.to_empty(device="cpu")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name not in stored:
                continue
            own = self.structure.names[f"{path}.{name}"]
            tensor.data = self.checkpoint.read(own).to(torch.float32)
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        for part in module.modules():
            if any(name in part._non_persistent_buffers_set for name in part._buffers):
                self.model._init_weights(part)

    @torch.no_grad()
    def embed(self, windows: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets, [n, tokens, hidden] in float32, and learn what all layers are called with.

        Args:
            windows: [n, tokens], int64.
        Raises: ConversionError for models whose layers get more of the text than their hidden states.
        """
        base_path = self.path.rpartition(".")[0]
        base = self.model.get_submodule(base_path)
        name = self.path.rpartition(".")[2]
        tuples = self._first_kind(base, name, base_path, windows[:1])
        stubs = [_Stub(layer, tuples) for layer in self.layers]
        rest = {key: part for key, part in base.named_children() if key != name}
        found = []
        setattr(base, name, nn.ModuleList(stubs))
        try:
            for key, part in rest.items():
                self._fill_if(part, f"{base_path}.{key}" if base_path else key)
            for i in range(len(windows)):
                base(input_ids=windows[i : i + 1], use_cache=False)
                found.append(stubs[0].hidden[0].float())
                calls = [(stub.args, stub.kwargs) for stub in stubs]
                if i == 0:
                    self._check_called(stubs)
                    self.inputs = calls
                elif i == 1 and not all(map(_same, calls, self.inputs)):
                    raise ConversionError(
                        f"the layers of {type(self.model).__name__} get more of a text than their hidden states, so that they "
                        "cannot be calibrated one by one"
                    )
        finally:
            setattr(base, name, self.layers)
            if not self.whole:
                for part in rest.values():
                    part.to("meta")
        return torch.stack(found)

    def _check_called(self, stubs: list["_Stub"]) -> None:
        """Raise ConversionError where a layer is left out on text, such as those that read images only."""
        left = [i for i, stub in enumerate(stubs) if not stub.called]
        if left:
            raise ConversionError(
                f"{type(self.model).__name__} leaves layer {left[0]} out when it reads text alone, so that it cannot be "
                'calibrated; use method="mean"'
            )

    def _fill_if(self, part: nn.Module, path: str) -> None:
        if not self.whole:
            self.fill(part, path)

    def _first_kind(self, base: nn.Module, name: str, base_path: str, window: torch.Tensor) -> bool:
        """Return whether layers answer with tuples: runs the first one on a few tokens."""
        seen: list[bool] = []

        class Seen(Exception):
            pass

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(isinstance(output, tuple))
            raise Seen

        handle = self.layers[0].register_forward_hook(hook)
        try:
            for key, part in base.named_children():
                if key != name:
                    self._fill_if(part, f"{base_path}.{key}" if base_path else key)
            with self.loaded(self.layers[0], f"{self.path}.0"):
                base(input_ids=window[:, :4], use_cache=False)
        except Seen:
            pass
        finally:
            handle.remove()
        return seen[0]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Load one layer for as long as the block lasts."""
        with self.loaded(self.layers[index], f"{self.path}.{index}") as module:
            yield module

    @torch.no_grad()
    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Run a loaded layer: hidden states [batch, tokens, hidden] of it -> those behind it."""
        args, kwargs = self.inputs[index]
        out = self.layers[index](hidden, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


class _Stub(nn.Module):
    """Takes the place of a layer: remembers what it was called with and passes the hidden states on."""

    def __init__(self, layer: nn.Module, tuples: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule: it must not be found twice
        self.tuples, self.called = tuples, False
        self.hidden = torch.empty(0)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        self.hidden, self.args, self.kwargs = hidden, args, kwargs
        return (hidden,) if self.tuples else hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)  # the model may ask a layer for its type


def _parts(config: Any) -> list[Any]:
    return [getattr(config, name) for name in config.sub_configs if getattr(config, name, None)]


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
