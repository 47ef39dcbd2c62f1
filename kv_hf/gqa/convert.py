"""Convert a checkpoint to fewer kv heads: structure, merge, write, shard by shard."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checks import check_choice
from ..errors import ConversionError
from ..version import __version__
from .card import model_card
from .checkpoint import INDEX, Checkpoint
from .layouts import join, parts_of, split
from .pooling import METHODS, pool_heads
from .structure import Structure, find_structure
from .writer import becoming, check_destination, copy_files, write_shard

# files beside the weights that a model needs, by pattern
BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.tiktoken", "chat_template*", "*.model", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALIBRATED = ("align", "svd")  # methods of calibrated.py, which read text
RECORD = "kv_hf_conversion"  # of config.json


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion does, or did.

    Attributes:
        source, destination: as given.
        method: how heads were merged.
        num_heads, num_kv_heads, new_kv_heads: of a layer.
        changed: tensors that changed.
        parameters, new_parameters: numbers in all tensors.
        kv_bytes_per_token, new_kv_bytes_per_token: of a cache in bf16.
        files: files with weights.
        nbytes: bytes of the new weights.
        seconds: that it took; 0 for a dry run.
    """

    source: str
    destination: str
    method: str
    num_heads: int
    num_kv_heads: int
    new_kv_heads: int
    changed: tuple[str, ...]
    parameters: int
    new_parameters: int
    kv_bytes_per_token: int
    new_kv_bytes_per_token: int
    files: int
    nbytes: int
    seconds: float = 0.0


def convert_to_gqa(
    source: str | Path,
    destination: str | Path,
    num_kv_heads: int,
    *,
    method: str = "mean",
    calibration: Any = None,
    dtype: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> ConversionReport:
    """Write a checkpoint whose attention layers have `num_kv_heads` kv heads; the source is only read.

    The result is an ordinary checkpoint of the same class, which needs no code of ours. Weights are read and written one
    tensor at a time.

    Args:
        source: folder of a checkpoint, or a model of the hub.
        destination: a folder that does not exist, or is empty.
        num_kv_heads: must divide the model's.
        method: "mean" (GQA, arXiv 2305.13245) or "first" need no data and lose most of a model's quality until it is trained
            again; "align" and "svd" fit the merged heads to what the model computes on `calibration`, and lose far less.
        calibration: text for "align" and "svd", as calibrated.calibrate takes it; None for the others.
        dtype: of all weights of the result (float32, bfloat16, float16); None keeps each one's own.
        dry_run: check everything and report, but write nothing.
        progress: called with (bytes written, bytes in all).
    Raises: ConversionError with the reason, with `destination` as it was.
    """
    check_choice("method", method, (*METHODS, *CALIBRATED))
    check_calibration(method, calibration)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    checkpoint = Checkpoint.open(source)
    structure = find_structure(checkpoint, num_kv_heads)
    layout = {name: parts_of(name, structure) for name in structure.changed}
    entries = new_entries(checkpoint, structure, None if dtype is None else DTYPES[dtype])
    report = _report(checkpoint, structure, str(destination), method, entries)
    target = Path(destination)
    check_destination(target, checkpoint.folder, report.nbytes)
    if dry_run:
        return report
    began = time.monotonic()
    done = 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, report.nbytes)

    def make(name: str) -> torch.Tensor:
        if name in overrides:
            return overrides[name].to(entries[name][0])
        tensor = checkpoint.read(name)
        if name in layout:
            found = split(tensor, layout[name])
            merged = {
                kind: part if kind == "query" else pool_heads(part, num_kv_heads, method)
                for kind, part in found.items()
            }
            tensor = join(merged, layout[name])
        return tensor.to(entries[name][0])

    with becoming(target) as folder, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        overrides = find_overrides(checkpoint, structure, method, calibration, Path(scratch))
        for file, names in checkpoint.files.items():
            kept = {name: entries[name] for name in names if name in entries}
            write_shard(folder / file, kept, make, written)
        write_rest(checkpoint, structure, entries, folder, report)
    return ConversionReport(**{**asdict(report), "seconds": time.monotonic() - began})


def check_calibration(method: str, calibration: Any) -> None:
    """Raise ConversionError unless a method that needs text has it, and no other."""
    if method in CALIBRATED and calibration is None:
        raise ConversionError(f"method {method!r} needs calibration text: give calibration")
    if method in METHODS and calibration is not None:
        raise ConversionError(
            f"method {method!r} reads no calibration text; those that do are {', '.join(CALIBRATED)}"
        )


def find_overrides(
    checkpoint: Checkpoint, structure: Structure, method: str, calibration: Any, scratch: Path
) -> Mapping[str, torch.Tensor]:
    """Return the tensors (names on disk) that a calibrated method makes; none for the other methods."""
    if method not in CALIBRATED:
        return {}
    try:
        from .calibrated import calibrate
    except ModuleNotFoundError as error:
        raise ConversionError(f"method {method!r} is not there yet") from error
    overrides: Mapping[str, torch.Tensor] = calibrate(
        checkpoint, structure, method, calibration, scratch
    )
    return overrides


def new_entries(
    checkpoint: Checkpoint, structure: Structure, dtype: torch.dtype | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of the result."""
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if name in structure.removed:
            continue
        shape = structure.changed[name][1] if name in structure.changed else tensor.shape
        own = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
        found[name] = (own, shape)
    return found


def _report(
    checkpoint: Checkpoint,
    structure: Structure,
    destination: str,
    method: str,
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> ConversionReport:
    before = sum(torch.Size(tensor.shape).numel() for tensor in checkpoint.tensors.values())
    after = sum(torch.Size(shape).numel() for _, shape in entries.values())
    layers = structure.old.get_text_config(decoder=True).num_hidden_layers
    per_head = 2 * 2 * layers * structure.head_dim
    return ConversionReport(
        source=checkpoint.name,
        destination=destination,
        method=method,
        num_heads=structure.num_heads,
        num_kv_heads=structure.num_kv_heads,
        new_kv_heads=structure.new_kv_heads,
        changed=tuple(structure.changed),
        parameters=before,
        new_parameters=after,
        kv_bytes_per_token=per_head * structure.num_kv_heads,
        new_kv_bytes_per_token=per_head * structure.new_kv_heads,
        files=len(checkpoint.files),
        nbytes=sum(torch.Size(shape).numel() * own.itemsize for own, shape in entries.values()),
    )


def write_rest(
    checkpoint: Checkpoint,
    structure: Structure,
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    folder: Path,
    report: ConversionReport,
) -> None:
    """Write everything but the weights: index, config, tokenizer, model card."""
    if checkpoint.index is not None:
        index = json.loads(json.dumps(checkpoint.index))
        index["weight_map"] = {name: checkpoint.tensors[name].file for name in entries}
        metadata = index.setdefault("metadata", {})
        metadata["total_size"] = report.nbytes
        if "total_parameters" in metadata:
            metadata["total_parameters"] = report.new_parameters
        _write_json(folder / INDEX, index)
    _write_json(folder / "config.json", new_config(checkpoint, structure, entries, report))
    for pattern in BESIDE:
        copy_files(
            checkpoint.folder, folder, sorted(path.name for path in checkpoint.folder.glob(pattern))
        )
    (folder / "README.md").write_text(model_card(checkpoint, report), "utf-8")


def new_config(
    checkpoint: Checkpoint,
    structure: Structure,
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    report: ConversionReport,
) -> dict[str, Any]:
    """Return config.json of the result: that of the source with the new numbers and a record of what was done."""
    config: dict[str, Any] = json.loads(json.dumps(checkpoint.config))
    config.pop("_name_or_path", None)
    text = structure.old.get_text_config(decoder=True)
    part = config
    if text is not structure.old:
        name = next(
            name for name in structure.old.sub_configs if getattr(structure.old, name, None) is text
        )
        part = config.setdefault(name, {})
    part["num_key_value_heads"] = structure.new_kv_heads
    if getattr(text, "head_dim", None) in (None, structure.head_dim):
        part["head_dim"] = structure.head_dim
    dtypes = {own for own, _ in entries.values() if own.is_floating_point}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        config.pop("torch_dtype", None)
    history = config.get(RECORD)
    config[RECORD] = {
        "kv_hf": __version__,
        "source": Path(report.source).name if Path(report.source).is_dir() else report.source,
        "method": report.method,
        "num_key_value_heads": [report.num_kv_heads, report.new_kv_heads],
        **({"before": history} if history else {}),
    }
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=path.name == INDEX) + "\n", "utf-8")
