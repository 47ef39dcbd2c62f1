"""Merge heads by what they do on calibration tokens, layer by layer, and keep the new tensors on disk.

Two streams of hidden states run through the model: those of the original and those of the converted layers so far. Each layer
is solved on what the converted one will see, and its outputs are fitted to give what the original gave and to make up for
what the streams have come apart.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..checks import check_choice
from .calibration_text import calibration_windows
from .checkpoint import Checkpoint
from .merge_layer import LayerMerge
from .recipe import RECIPES, Recipe
from .stream import LayerStream
from .structure import Structure


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
    Raises: ConversionError for models that cannot be calibrated, with the reason.
    """
    check_choice("method", method, tuple(RECIPES))
    windows = calibration_windows(checkpoint, structure, calibration)
    stream = LayerStream(checkpoint, structure)
    original = stream.embed(windows)
    converted = original.clone()
    names = stream.own_names()
    files: dict[str, Path] = {}
    for index in range(stream.count):
        with stream.layer(index):
            if any(name.startswith(f"{stream.path}.{index}.") for name in names):
                merge = LayerMerge(stream, index, original, converted, recipe or RECIPES[method])
                tensors = {name: t.float().contiguous() for name, t in merge.run().items()}
                file = scratch / f"layer-{index:05d}.safetensors"
                save_file(tensors, file)
                files.update(dict.fromkeys(tensors, file))
                report({"layer": index, **merge.figures})
            else:
                for hidden in (original, converted):
                    for i in range(len(hidden)):
                        hidden[i] = stream.run(index, hidden[i : i + 1])[0]
        progress(index + 1, stream.count)
    return Overrides(files)
