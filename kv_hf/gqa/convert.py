"""Convert a checkpoint to fewer kv heads: plan, merge, write, one tensor at a time."""

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checks import check_choice
from ..errors import ConversionError
from ..files.folders import scratch_folder
from ..files.writing import create_text
from ..records import CONVERSION
from .beside import CARD, copy_files, files_beside
from .card import model_card
from .checkpoint import INDEX, Checkpoint
from .cross_class import CROSS_CLASS, plan_cross_class
from .heads import check_count
from .merge_plan import Plan, cast, plan_merging
from .new_config import merged_config, set_dtype
from .pooling import METHODS
from .report import ConversionReport, make_report, record
from .structure import Structure, find_structure, load_config
from .writer import becoming, check_destination, write_shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALIBRATED = ("align", "svd")  # methods of calibrated.py, which read text


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
    calibrating: Callable[[int, int], object] = lambda done, of: None,
) -> ConversionReport:
    """Write a checkpoint whose attention layers have `num_kv_heads` kv heads; the source is only read.

    The result is an ordinary checkpoint, which needs no code of ours: of the same class, or for GPT-NeoX (with parallel
    residual) and GPT-2, whose classes know no grouped kv heads, of Phi and GPTBigCode, which compute the same. Weights are
    read and written one tensor at a time.

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
        calibrating: called with (layers done, layers), before anything is written.
    Raises: ConversionError with the reason, with `destination` as it was; CacheOptionError for an unknown method or dtype.
    """
    check_choice("method", method, (*METHODS, *CALIBRATED))
    check_calibration(method, calibration)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    check_count(num_kv_heads)
    target = Path(destination)
    check_destination(target)
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, num_kv_heads, method, None if dtype is None else DTYPES[dtype])
    report = make_report(checkpoint, plan, str(destination), method)
    check_destination(target, checkpoint.folder, report.nbytes)
    beside = files_beside(checkpoint.folder)
    if method in CALIBRATED and plan.structure is not None:
        from .ready import ready_to_calibrate

        calibration, memory = ready_to_calibrate(
            checkpoint, plan.structure, method, calibration, dry_run
        )
        report = replace(report, memory=memory)
    if dry_run:
        return report
    began = time.monotonic()
    with becoming(target) as folder, scratch_beside(folder, method) as scratch:
        overrides = find_overrides(
            checkpoint, plan.structure, method, calibration, scratch, calibrating
        )
        write_weights(checkpoint, plan, overrides, folder, progress)
        report = replace(report, changed=tuple(dict.fromkeys([*report.changed, *overrides])))
        write_rest(checkpoint, plan, folder, report, beside)
        checkpoint.check_unchanged()
    return replace(report, seconds=time.monotonic() - began)


def make_plan(
    checkpoint: Checkpoint, num_kv_heads: int, method: str, dtype: torch.dtype | None
) -> Plan:
    """Return the plan of a conversion. Raises ConversionError for models that cannot be converted, with the reason."""
    if checkpoint.config["model_type"] not in CROSS_CLASS:
        structure = find_structure(checkpoint, num_kv_heads)
        config = merged_config(checkpoint, structure)
        plan = plan_merging(checkpoint, structure, method, dtype, config)
    else:
        plan = plan_cross_class(
            checkpoint, load_config(checkpoint.folder), num_kv_heads, method, dtype
        )
        if method in CALIBRATED and not plan.exact:
            raise ConversionError(
                f"method {method!r} merges heads within a class: convert {checkpoint.name} to {plan.new_class} with "
                f"num_kv_heads={plan.counts[1]} first, which is exact, and that to {num_kv_heads}"
            )
    if dtype is not None:
        set_dtype(plan.config, dtype)
    return plan


def check_calibration(method: str, calibration: Any) -> None:
    """Raise ConversionError unless a method that needs text has it, and no other."""
    if method in CALIBRATED and calibration is None:
        raise ConversionError(f"method {method!r} needs calibration text: give calibration")
    if method in METHODS and calibration is not None:
        raise ConversionError(
            f"method {method!r} reads no calibration text; those that do are {', '.join(CALIBRATED)}"
        )


@contextlib.contextmanager
def scratch_beside(folder: Path, method: str) -> Iterator[Path]:
    """Make a folder for what a calibrated method keeps meanwhile, on the disk of the result; the others need none."""
    if method not in CALIBRATED:
        yield folder
        return
    with scratch_folder(folder) as scratch:
        yield scratch


def find_overrides(
    checkpoint: Checkpoint,
    structure: Structure | None,
    method: str,
    calibration: Any,
    scratch: Path,
    calibrating: Callable[[int, int], object] = lambda done, of: None,
) -> Mapping[str, torch.Tensor]:
    """Return the tensors that a calibrated method makes, by name on disk; none for the other methods.

    Args:
        calibration: text, or token ids [windows, tokens], int64.
        scratch: an existing folder for the new tensors.
        calibrating: called with (layers done, layers).
    Returns: float32 tensors [new shapes], each read from `scratch` when it is asked for.
    Raises: ConversionError as in `calibrate`; OSError where `scratch` cannot be written.
    """
    if method not in CALIBRATED or structure is None:
        return {}
    from .calibrated import calibrate

    overrides: Mapping[str, torch.Tensor] = calibrate(
        checkpoint, structure, method, calibration, scratch, progress=calibrating
    )
    return overrides


def write_weights(
    checkpoint: Checkpoint,
    plan: Plan,
    overrides: Mapping[str, torch.Tensor],
    folder: Path,
    progress: Callable[[int, int], object],
) -> None:
    """Write the files of weights, under the names that they have in the source.

    Args:
        overrides: tensors [new shapes] by name, in place of the plan's; cast to the plan's dtypes.
        progress: called with (bytes written, bytes of all).
    """
    done, nbytes = 0, plan.nbytes

    def written(count: int) -> None:
        nonlocal done
        done += count
        progress(done, nbytes)

    def make(name: str) -> torch.Tensor:
        if name in overrides:
            return cast(name, overrides[name], plan.recipes[name].dtype)
        return plan.make(checkpoint, name)

    for file, opened in checkpoint.opened.items():
        entries = {
            name: (recipe.dtype, recipe.shape)
            for name, recipe in plan.recipes.items()
            if recipe.file == file
        }
        if not entries:  # masks of an old checkpoint, which the new class does not have
            continue
        write_shard(folder / file, entries, make, written, opened.metadata)


def write_rest(
    checkpoint: Checkpoint, plan: Plan, folder: Path, report: ConversionReport, beside: list[Path]
) -> None:
    """Write everything but the weights: index, config, tokenizer, model card."""
    if checkpoint.index is not None:
        index = copy.deepcopy(checkpoint.index)
        index["weight_map"] = {name: recipe.file for name, recipe in plan.recipes.items()}
        metadata = index.get("metadata")
        metadata = index["metadata"] = dict(metadata) if isinstance(metadata, dict) else {}
        metadata["total_size"] = report.nbytes
        if "total_parameters" in metadata:
            metadata["total_parameters"] = report.new_parameters
        _write_json(folder / INDEX, index)
    config = {**plan.config, CONVERSION: record(checkpoint, report)}
    _write_json(folder / "config.json", config)
    copy_files(checkpoint.folder, folder, beside)
    create_text(folder / CARD, model_card(checkpoint, report))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    create_text(path, json.dumps(value, indent=2, sort_keys=path.name == INDEX) + "\n")
