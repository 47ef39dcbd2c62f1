"""Convert a checkpoint to fewer kv heads: a map over its files of weights, written aside and renamed.

`kv-hf convert-gqa SRC DST --num-kv-heads G` is `convert`.
"""

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from ..checks import check_choice
from ..errors import ConversionError, KVCacheError
from ..files import COPIED_BYTES, becoming_folder, read_bytes, scratch_folder
from ..model_fields import CONVERSION
from ..printable import printable, tell, tell_error
from ..version import __version__
from .renames import ROUTES
from .source import CARD, INDEX, SINGLE, Source
from .stream import calibration_windows
from .structure import Structure, find_structure
from .svd import calibrate

METHODS = ("mean", "svd")
# what was done, without figures: those of another model would read as if they were this one's
WHAT = {
    "mean": "The key and value projections of each group of heads were replaced by their mean (GQA, arXiv 2305.13245). Without "
    "further training such a model is of little use.",
    "svd": "The heads of each group were replaced by their principal components on calibration text, and queries, keys and "
    "outputs fitted to what the original computes there. It needs further training to come near the original.",
    "exact": "No heads were merged.",
}


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion: planned, or done.

    Attributes:
        method: how heads were merged; "exact" where none was.
        num_kv_heads, new_kv_heads: of a layer.
        changed: tensors that were not copied byte for byte.
        parameters, new_parameters: numbers in all tensors.
        kv_bytes_per_token, new_kv_bytes_per_token: of a cache in bf16, all layers.
        nbytes: bytes of the new weights.
        notes: what else the user should know.
    """

    method: str
    num_kv_heads: int
    new_kv_heads: int
    changed: tuple[str, ...]
    parameters: int
    new_parameters: int
    kv_bytes_per_token: int
    new_kv_bytes_per_token: int
    nbytes: int
    notes: tuple[str, ...]

    def table(self) -> str:
        """Return what changes, as lines: of the model card, and of the command."""
        kv_bytes = self.kv_bytes_per_token, self.new_kv_bytes_per_token
        rows = {
            "kv heads of a layer": (self.num_kv_heads, self.new_kv_heads),
            "bytes of a token's keys and values (bf16)": kv_bytes,
            "parameters": (self.parameters, self.new_parameters),
        }
        lines = [f"| {name} | {old:,} | {new:,} |" for name, (old, new) in rows.items()]
        return "\n".join(["| | before | after |", "| --- | ---: | ---: |", *lines])


def convert_to_gqa(
    source: str | Path,
    destination: str | Path,
    num_kv_heads: int,
    *,
    method: str = "mean",
    calibration: Any = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Write a checkpoint whose attention layers have `num_kv_heads` kv heads; the source is only read.

    The result is an ordinary checkpoint, which needs no code of ours: of the same class, or for GPT-NeoX (with parallel
    residual) and GPT-2, whose classes know no grouped kv heads, of Phi and GPTBigCode, which compute the same. One file of
    weights is in memory at a time. On a terminal, bars show how far it is.

    Args:
        source: folder of a checkpoint, or a model of the hub.
        destination: a folder that does not exist, or is empty.
        num_kv_heads: must divide the model's.
        method: "mean" (GQA, arXiv 2305.13245) needs no data and loses most of a model's quality until it is trained
            again; "svd" fits the merged heads to what the model computes on `calibration`, and loses far less.
        calibration: for "svd" a text (a bundled name, a file, "dataset:..") or token ids [windows, tokens], int64.
        dry_run: report, but write nothing.
    Raises: ConversionError with the reason, with `destination` as it was; CacheOptionError for an unknown method.
    """
    check_choice("method", method, METHODS)
    if (method == "svd") != (calibration is not None):
        wrong = "needs" if method == "svd" else "reads no"
        raise ConversionError(
            f"method {method!r} {wrong} calibration text: give calibration with svd"
        )
    opened = Source.open(source)
    route = ROUTES.get(str(opened.config.get("model_type")))
    structure = (route.structure if route else find_structure)(opened, num_kv_heads)
    if structure.num_kv_heads == num_kv_heads:
        method = "exact"
    if method == "svd" and structure.new_class:
        heads, target = structure.num_kv_heads, structure.new_class
        raise ConversionError(
            f"method 'svd' merges heads within a class: convert {source} to {target} with num_kv_heads={heads} first, which "
            f"is exact, and that to {num_kv_heads}"
        )
    windows = calibration_windows(opened, structure, calibration) if method == "svd" else None
    others = opened.others()
    report = make_report(opened, structure, method)
    try:
        check_destination(Path(destination), opened.folder)
        if dry_run:
            return report
        with becoming_folder(Path(destination)) as folder, scratch_folder(folder) as scratch:
            if windows is not None:
                structure.made.update(calibrate(opened, structure, windows, scratch))
                report = replace(report, changed=structure.changed())
            write_weights(opened, structure, folder, report.nbytes)
            write_rest(opened, structure, folder, report, others)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConversionError(
            f"{source} cannot be converted into destination {str(destination)!r}: {why}"
        ) from error
    return report


def make_report(source: Source, structure: Structure, method: str) -> ConversionReport:
    """Return the report of a conversion that was not run yet; its tensors are made on the meta device."""
    meta = source.tensors
    new_parameters = nbytes = 0
    for name, (names, _) in structure.made.items():
        count = structure.make(name, meta.__getitem__).numel()
        new_parameters += count
        nbytes += count * meta[names[0]].itemsize
    old, new = structure.num_kv_heads, structure.new_kv_heads
    return ConversionReport(
        method=method,
        num_kv_heads=old,
        new_kv_heads=new,
        changed=structure.changed(),
        parameters=sum(tensor.numel() for tensor in meta.values()),
        new_parameters=new_parameters,
        kv_bytes_per_token=2 * structure.kv_numbers,
        new_kv_bytes_per_token=2 * structure.kv_numbers * new // old,
        nbytes=nbytes,
        notes=tuple(filter(None, (structure.note, WHAT[method]))),
    )


def check_destination(destination: Path, source: Path) -> None:
    """Raise ConversionError unless a folder can become `destination`, outside of the folder that is converted.

    Raises: OSError too, for a place where nothing can be written.
    """
    name, place = f"destination {str(destination)!r}", destination.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        wrong = "not empty" if place.is_dir() else "a file"
        raise ConversionError(f"{name} is {wrong}; give a folder that does not exist")
    if place.is_relative_to(source.resolve()):
        raise ConversionError(f"{name} lies within the source, which is never changed")
    parent = next(folder for folder in place.parents if folder.exists())
    with scratch_folder(parent / place.name):
        pass


def write_weights(source: Source, structure: Structure, folder: Path, nbytes: int) -> None:
    """Write the files of weights, under the names that they have in the source; one is in memory at a time."""
    with tqdm(total=nbytes, desc="writing", unit="B", unit_scale=True, disable=None) as bar:
        for file, reader in source.files.items():
            tensors = {}
            for name, (names, _) in structure.made.items():
                if source.places[names[0]] == file:
                    dtype = source.tensors[names[0]].dtype
                    tensors[name] = _cast(name, structure.make(name, source.read), dtype)
            # else it held masks of an old checkpoint alone, which the new class does not have
            if tensors:
                metadata = dict(reader.metadata() or {}, format="pt")
                save_file(tensors, folder / file, metadata)
            bar.update(sum(tensor.nbytes for tensor in tensors.values()))


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor [any shape] in the dtype of its file. Raises ConversionError where numbers are too large for it."""
    found = tensor.to(dtype).contiguous()
    if not torch.equal(found.isinf(), tensor.isinf()):
        raise ConversionError(f"{name!r} would hold numbers too large for {dtype}, its file's")
    return found


def write_rest(
    source: Source, structure: Structure, folder: Path, report: ConversionReport, others: list[Path]
) -> None:
    """Write everything but the weights: index, config, tokenizer, model card."""
    if SINGLE not in source.files:
        places = {}
        for name, (names, _) in structure.made.items():
            places[name] = source.places[names[0]]
        index = {"metadata": {"total_size": report.nbytes}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
    made = record(source, structure, report.method)
    config = {**structure.new_json, CONVERSION: made}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    copy_files(source, others, folder)
    card = model_card(source.card(), made["source"], report)
    (folder / CARD).write_text(card, encoding="utf-8")


def copy_files(source: Source, files: list[Path], folder: Path) -> None:
    """Copy files that lie in the folder of a source, or in folders there. Raises OSError."""
    for path in files:
        place = folder / path.relative_to(source.folder)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(read_bytes(path, COPIED_BYTES, "file"))


def record(source: Source, structure: Structure, method: str) -> dict[str, Any]:
    """Return the record of a conversion that config.json keeps."""
    folder = Path(os.path.realpath(source.folder))
    found: dict[str, Any] = {"kv_hf": __version__, "source": folder.name, "method": method}
    # of the hub's cache: models--<owner>--<name>/snapshots/<revision>
    if folder.parent.name == "snapshots":
        found["source"] = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        found["revision"] = folder.name
    found["num_key_value_heads"] = [structure.num_kv_heads, structure.new_kv_heads]
    if structure.new_class:
        found["class"] = [source.config["model_type"], structure.new_class]
    if history := source.config.get(CONVERSION):
        found["before"] = history
    return found


def model_card(own: str, base: str, report: ConversionReport) -> str:
    """Return README.md of a converted checkpoint: front matter for the hub, what was done, and the source's own card behind it.

    Args:
        own: the source's card, whose fields (its licence among them) are kept where they are a YAML object.
        base: name of the source, which becomes `base_model`.
    """
    block = REGEX_YAML_BLOCK.search(own)
    try:
        fields = dict(yaml.safe_load(block[2]) if block else {})
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        fields = {}
    tags = fields.get("tags")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    fields["tags"] = list(dict.fromkeys([*tags, "kv_hf", "gqa"]))
    fields |= {"base_model": base, "library_name": "transformers"}
    head = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    own = own[block.end() :].strip() if block else own.strip()
    behind = f"\n---\n\nThe card of the original model:\n\n{own}\n" if own else ""
    notes = "".join(f"- {note}\n" for note in report.notes)
    return (
        f"---\n{head}---\n\n# {base.rpartition('/')[2]}, {report.num_kv_heads} to {report.new_kv_heads} kv heads\n\n"
        f"Converted by kv_hf (method `{report.method}`). How far it is from the original was not measured.\n\n"
        f"{report.table()}\n\n{notes}\n"
        f"It is an ordinary checkpoint of its class: transformers loads it without any code of kv_hf.\n{behind}"
    )


def convert(args: argparse.Namespace, prog: str) -> int:
    """Run a conversion; return the exit code: 0, 2 for an error that says its reason, 130 when it was stopped.

    Args:
        args: of `kv-hf convert-gqa`, as kv_hf_cli.py reads them, which are those of `convert_to_gqa`.
        prog: what errors begin with.
    """
    try:
        report = convert_to_gqa(**vars(args))
    except (KVCacheError, OSError, MemoryError) as error:
        tell_error(prog, error)
        return 2
    except KeyboardInterrupt:
        tell(f"{prog}: stopped; {args.destination} is as it was", to_errors=True)
        return 130
    lines = [f"{args.source}, method {report.method}", report.table()]
    lines += [f"{len(report.changed)} tensors change, {report.nbytes:,} bytes of weights"]
    lines += [f"note: {printable(note)}" for note in report.notes]
    written = f"written to {args.destination}"
    tell("\n".join([*lines, "nothing was written (dry run)" if args.dry_run else written]))
    return 0
