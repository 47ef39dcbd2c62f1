"""Merge heads by what they do on calibration tokens, layer by layer, and keep the new tensors on disk.

Two streams of hidden states run through the model: those of the original and those of the converted layers so far. Each layer
is solved on what the converted one will see, and its outputs are fitted to give what the original gave and to make up for
what the streams have come apart.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ..checks import check_choice
from ..errors import ConversionError, first_line
from .calibration_text import calibration_windows
from .checkpoint import Checkpoint
from .merge_layer import LayerMerge
from .recipe import RECIPES, Recipe
from .stream import LayerStream
from .structure import Structure
from .writer import write_shard

LOOK = 64  # tokens of a window that a layer is looked at with when nothing is solved


class Overrides(Mapping[str, torch.Tensor]):
    """New tensors by their names on disk, read from files when they are asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@torch.no_grad()
def calibrate(
    checkpoint: Checkpoint,
    structure: Structure,
    method: str,
    calibration: str | Path | torch.Tensor,
    scratch: Path,
    *,
    recipe: Recipe | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
    report: Callable[[dict[str, float]], object] = lambda figures: None,
) -> Overrides:
    """Return all tensors that a calibrated merge changes, in float32 and of their new shapes.

    Args:
        method: "align" or "svd".
        calibration: text, or token ids [windows, tokens], int64: several thousand in all (see calibration_text.py).
        scratch: an existing folder; gets one safetensors file per layer.
        recipe: other settings than the method's own.
        progress: called with (layers done, layers).
        report: called with the figures of each layer: how much of its target's energy is missed, and how far the streams
            have come apart.
    Raises: ConversionError for models that cannot be calibrated, with the reason, and where numbers are not finite; OSError
        where `scratch` cannot be written.
    """
    check_choice("method", method, tuple(RECIPES))
    windows = calibration_windows(checkpoint, structure, calibration)
    stream, original = begin(checkpoint, structure, windows)
    check_layers(stream, original[:1], recipe or RECIPES[method])
    converted = original.clone()
    files: dict[str, Path] = {}
    for index in range(stream.count):
        path = f"{stream.path}.{index}"
        with stream.layer(index):
            if stream.changes(index):
                merge = LayerMerge(stream, index, original, converted, recipe or RECIPES[method])
                tensors = solve(merge, path)
                file = scratch / f"layer-{index:05d}.safetensors"
                entries = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
                write_shard(file, entries, tensors.__getitem__)
                files.update(dict.fromkeys(tensors, file))
                report({"layer": index, **merge.figures})
            else:
                for hidden in (original, converted):
                    for i in range(len(hidden)):
                        hidden[i] = stream.run(index, hidden[i : i + 1])[0]
        check_streams(path, original, converted)
        progress(index + 1, stream.count)
    return Overrides(files)


@torch.no_grad()
def check_calibrated(
    checkpoint: Checkpoint, structure: Structure, method: str, windows: torch.Tensor
) -> None:
    """Raise ConversionError for models that cannot be calibrated.

    Looks at one layer of each kind, on the first tokens of two windows, and solves nothing.

    Args:
        windows: token ids [windows, tokens], int64.
    """
    stream, hidden = begin(checkpoint, structure, windows[:2, :LOOK])
    check_layers(stream, hidden[:1], RECIPES[method])


def begin(
    checkpoint: Checkpoint, structure: Structure, windows: torch.Tensor
) -> tuple[LayerStream, torch.Tensor]:
    """Return the layers of a model and what the first one gets: [windows, tokens, hidden], float32."""
    stream = LayerStream(checkpoint, structure)
    hidden = stream.embed(windows)
    check_streams("the embeddings", hidden)
    if not hidden.any():
        raise ConversionError(
            f"the embeddings of all calibration tokens of {checkpoint.name} are zero"
        )
    return stream, hidden


def check_layers(stream: LayerStream, hidden: torch.Tensor, recipe: Recipe) -> None:
    """Raise ConversionError for layers that cannot be merged, one of each kind, before any is solved.

    Args:
        hidden: [windows, tokens, hidden], float32: what every layer is tried on.
    """
    for index in stream.first_of_each_kind():
        with stream.layer(index):
            LayerMerge(stream, index, hidden, hidden, recipe)


def solve(merge: LayerMerge, path: str) -> dict[str, torch.Tensor]:
    """Return the new tensors of a layer [new shapes], float32, by their names on disk.

    Raises: ConversionError naming the layer where they are not finite.
    """
    try:
        found = {name: tensor.float().contiguous() for name, tensor in merge.run().items()}
    except torch.linalg.LinAlgError as error:
        raise ConversionError(
            f"{path!r} cannot be merged: its numbers on the calibration text are too large or not finite ({first_line(error)})"
        ) from error
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            raise ConversionError(
                f"{path!r} cannot be merged: {name!r} would hold numbers that are not finite"
            )
    return found


def check_streams(what: str, *streams: torch.Tensor) -> None:
    """Raise ConversionError where hidden states are not finite: weights are not, or they overflow float32.

    Args:
        what: the place in the model, for the message.
        streams: hidden states [windows, tokens, hidden] behind it.
    """
    if not all(bool(hidden.isfinite().all()) for hidden in streams):
        raise ConversionError(
            f"{what!r}: hidden states of the calibration text are not finite there (weights that are not, or numbers too "
            "large for float32)"
        )
