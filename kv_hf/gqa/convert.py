"""Convert a checkpoint to fewer kv heads: a map over its files of weights, written aside and renamed."""

import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..checks import check_choice
from ..errors import ConversionError
from ..files import BESIDE_BYTES, becoming_folder, create_text, creating, read_bytes, scratch_folder
from ..records import CONVERSION
from ..version import __version__
from .heads import Made, merged_tensors
from .renames import ROUTES
from .source import CARD, INDEX, Source
from .structure import Structure, build, config_of, find_names, find_structure, shapes_of

METHODS = ("mean", "svd")
Progress = Callable[[str, int, int], object]  # (unit, done, of)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WHAT = {
    "mean": "the key and value projections of each group of heads were replaced by their mean (GQA, arXiv 2305.13245)",
    "svd": "the heads of each group were replaced by their principal components on calibration text, and queries, keys and "
    "outputs fitted to what the original computes there",
    "exact": "no heads were merged",
}
# no figures: those of another model would read as if they were this one's
WARNING = {
    "mean": "Without further training such a model is of little use.",
    "svd": "It needs further training to come near the original.",
    "exact": "It computes what the original computes, up to rounding.",
}


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion: planned, or done.

    Attributes:
        source, destination: as given.
        method: how heads were merged; "exact" where none was.
        num_heads, num_kv_heads, new_kv_heads: of a layer.
        changed: tensors that were not copied byte for byte.
        parameters, new_parameters: numbers in all tensors.
        kv_bytes_per_token, new_kv_bytes_per_token: of a cache in bf16, all layers.
        files: files with weights.
        nbytes: bytes of the new weights.
        new_class: class of the result where it is another one than the source's, else "".
        notes: what else the user should know.
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
    new_class: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """Return what changes: (name, before, after)."""
        kv_bytes = self.kv_bytes_per_token, self.new_kv_bytes_per_token
        return (
            ("kv heads of a layer", self.num_kv_heads, self.new_kv_heads),
            ("bytes of a token's keys and values (bf16)", *kv_bytes),
            ("parameters", self.parameters, self.new_parameters),
        )


@dataclass(frozen=True)
class Plan:
    """A conversion, ready to run.

    Attributes:
        made: tensors of the result by name -> (names on disk, what makes them of these; None copies).
        shapes: of those that are not copied.
        dtype: of all weights of the result; None keeps each one's own.
        config: config.json of the result, without the record of the conversion.
        structure: of a conversion within a class; None where the class changes.
        heads: query heads, kv heads, new kv heads.
        kv_bytes: of a token's keys and values, in bf16.
        method: how heads are merged.
        notes: what the user should know.
        new_class: class of the result where it is another one.
    """

    made: Made
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype | None
    config: dict[str, Any]
    structure: Structure | None
    heads: tuple[int, int, int]
    kv_bytes: int
    method: str
    notes: tuple[str, ...] = ()
    new_class: str = ""

    def dtype_of(self, source: Source, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the result."""
        own = source.tensors[self.made[name][0][0]].dtype
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def make(self, source: Source, name: str) -> torch.Tensor:
        """Return one tensor of the result, of any shape [..], contiguous."""
        names, how = self.made[name]
        tensors = [source.read(each) for each in names]
        found = tensors[0] if how is None else how(*tensors)
        return cast(name, found, self.dtype_of(source, name)).contiguous()


def convert_to_gqa(
    source: str | Path,
    destination: str | Path,
    num_kv_heads: int,
    *,
    method: str = "mean",
    calibration: Any = None,
    dtype: str | None = None,
    dry_run: bool = False,
    progress: Progress = lambda unit, done, of: None,
) -> ConversionReport:
    """Write a checkpoint whose attention layers have `num_kv_heads` kv heads; the source is only read.

    The result is an ordinary checkpoint, which needs no code of ours: of the same class, or for GPT-NeoX (with parallel
    residual) and GPT-2, whose classes know no grouped kv heads, of Phi and GPTBigCode, which compute the same. One file of
    weights is in memory at a time.

    Args:
        source: folder of a checkpoint, or a model of the hub.
        destination: a folder that does not exist, or is empty.
        num_kv_heads: must divide the model's.
        method: "mean" (GQA, arXiv 2305.13245) needs no data and loses most of a model's quality until it is trained
            again; "svd" fits the merged heads to what the model computes on `calibration`, and loses far less.
        calibration: for "svd" a text (a bundled name, a file, "dataset:..") or token ids [windows, tokens], int64.
        dtype: of all weights of the result (float32, bfloat16, float16); None keeps each one's own.
        dry_run: check everything and report, but write nothing.
        progress: called with ("layers", merged, of) by "svd", and then with ("bytes", written, of).
    Raises: ConversionError with the reason, with `destination` as it was; CacheOptionError for an unknown method or dtype.
    """
    began = time.monotonic()
    check_choice("method", method, METHODS)
    if (method == "svd") != (calibration is not None):
        wrong = "needs" if method == "svd" else "reads no"
        raise ConversionError(
            f"method {method!r} {wrong} calibration text: give calibration with svd"
        )
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    opened = Source.open(source)
    plan = make_plan(opened, num_kv_heads, method, None if dtype is None else DTYPES[dtype])
    check_destination(Path(destination), opened.folder)
    beside = opened.beside()
    windows = None
    if method == "svd" and plan.structure is not None:
        from .stream import calibration_windows

        windows = calibration_windows(opened, plan.structure, calibration)
    report = make_report(opened, plan, str(destination))
    if dry_run:
        return report
    try:
        with becoming_folder(Path(destination)) as folder, scratch_folder(folder) as scratch:
            if windows is not None and plan.structure is not None:
                from .svd import calibrate

                calibrated = calibrate(opened, plan.structure, windows, scratch, progress)
                plan.made.update(calibrated)
                report = make_report(opened, plan, str(destination))
            write_weights(opened, plan, folder, report.nbytes, progress)
            write_rest(opened, plan, folder, report, beside)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConversionError(
            f"destination {str(destination)!r} cannot be written: {why}"
        ) from error
    return replace(report, seconds=time.monotonic() - began)


def make_plan(source: Source, num_kv_heads: int, method: str, dtype: torch.dtype | None) -> Plan:
    """Return the plan of a conversion. Raises ConversionError for models that cannot be converted, with the reason."""
    if source.config.get("model_type") in ROUTES:
        return _plan_renames(source, num_kv_heads, method, dtype)
    structure = find_structure(source, num_kv_heads)
    size = structure.num_kv_heads // structure.new_kv_heads
    unknown = structure.names.unknown
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    note = (
        f"the class does not have {unknown[:1]}{more}: copied as they are, with all their kv heads"
    )
    rows = sum(
        old[0] - new[0]
        for name, (old, new) in structure.changed.items()
        if len(old) == 2 and "k_norm" not in name
    )
    # 2 bytes of each number; the merge leaves one of `size`
    kv_bytes = 2 * rows * size // (size - 1)
    return Plan(
        made=merged_tensors(source, structure),
        shapes={name: new for name, (_, new) in structure.changed.items()},
        dtype=dtype,
        config=_with_dtype(structure.new_json, dtype),
        structure=structure,
        heads=(structure.num_heads, structure.num_kv_heads, num_kv_heads),
        kv_bytes=kv_bytes,
        method=method,
        notes=(note,) if unknown else (),
    )


def _plan_renames(
    source: Source, num_kv_heads: int, method: str, dtype: torch.dtype | None
) -> Plan:
    """Return the plan of a conversion to another class; with as many kv heads as there are, nothing is merged."""
    config = config_of(source.config, source)
    route = ROUTES[config.model_type]
    new, heads = route.config(config, num_kv_heads), config.num_attention_heads
    exact = num_kv_heads == heads
    if method == "svd" and not exact:
        raise ConversionError(
            f"method 'svd' merges heads within a class: convert {source.name} to {route.target} with "
            f"num_kv_heads={heads} first, which is exact, and that to {num_kv_heads}"
        )
    names = find_names(source, build(config))
    made = route.tensors(config, num_kv_heads)
    if config.tie_word_embeddings and "lm_head.weight" not in names.on_disk:
        made.pop("lm_head.weight")
    used = {each for sources, _ in made.values() for each in sources}
    lost = [name for own, name in names.on_disk.items() if own not in used]
    if lost := lost + names.rebuilt + names.unknown:
        raise ConversionError(f"{source.folder} holds {lost[0]!r}, which would be lost")
    found = json.loads(new.to_json_string(use_diff=True))
    for name in ("dtype", "torch_dtype", "tokenizer_class", "task_specific_params"):
        if name in source.config:
            found[name.removeprefix("torch_")] = source.config[name]
    said = "which computes the same as" if exact else "as no grouped kv heads are known to"
    return Plan(
        made={
            name: (tuple(names.on_disk[each] for each in sources), how)
            for name, (sources, how) in made.items()
        },
        shapes=shapes_of(build(new)),
        dtype=dtype,
        config=_with_dtype(found, dtype),
        structure=None,
        heads=(heads, heads, num_kv_heads),
        kv_bytes=2 * 2 * config.num_hidden_layers * config.hidden_size,
        method="exact" if exact else method,
        notes=(f"the result is a {route.target}, {said} {route.source}",),
        new_class=route.target,
    )


def _with_dtype(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Write the dtype of all weights into a config.json, and into its parts that have one."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        if dtype is not None and (part is config or "dtype" in part or "torch_dtype" in part):
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
    return config


def make_report(source: Source, plan: Plan, destination: str) -> ConversionReport:
    """Return the report of a plan that was not run yet."""
    copied = {name: source.tensors[names[0]] for name, (names, _) in plan.made.items()}
    numbers = {n: torch.Size(plan.shapes.get(n, t.shape)).numel() for n, t in copied.items()}
    heads, kv_heads, new = plan.heads
    return ConversionReport(
        source=source.name,
        destination=destination,
        method=plan.method,
        num_heads=heads,
        num_kv_heads=kv_heads,
        new_kv_heads=new,
        changed=tuple(name for name, (_, how) in plan.made.items() if how is not None),
        parameters=sum(tensor.numel for tensor in source.tensors.values()),
        new_parameters=sum(numbers.values()),
        files=len({tensor.file for tensor in copied.values()}),
        nbytes=sum(plan.dtype_of(source, name).itemsize * n for name, n in numbers.items()),
        kv_bytes_per_token=plan.kv_bytes,
        new_kv_bytes_per_token=plan.kv_bytes * new // kv_heads,
        new_class=plan.new_class,
        notes=plan.notes,
    )


def check_destination(destination: Path, source: Path) -> None:
    """Raise ConversionError unless a folder can become `destination`, outside of the folder that is converted."""
    name = f"destination {str(destination)!r}"
    try:
        if destination.is_symlink():
            raise ConversionError(f"{name} is a link; give the folder itself")
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            raise ConversionError(
                f"{name} is {'not empty' if destination.is_dir() else 'a file'}; give a folder that does not exist"
            )
        home = source.resolve()
        if home in (place := destination.resolve(), *place.parents):
            raise ConversionError(f"{name} lies within the source, which is never changed")
        there = next(parent for parent in place.parents if parent.exists())
        with tempfile.TemporaryFile(dir=there):
            pass  # before models are loaded, and not behind them
    except OSError as error:
        raise ConversionError(f"{name} cannot be written: {error.strerror or error}") from error


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [any shape] in another dtype. Raises ConversionError where finite numbers would become infinite."""
    found = tensor.to(dtype)
    if found.dtype != tensor.dtype and int(found.isinf().sum()) > int(tensor.isinf().sum()):
        lost = tensor[found.isinf() & tensor.isfinite()].abs().min().item()
        raise ConversionError(
            f"{name!r} holds {lost:.3g}, which {str(dtype).removeprefix('torch.')} cannot hold"
        )
    return found


def write_weights(
    source: Source, plan: Plan, folder: Path, nbytes: int, progress: Progress
) -> None:
    """Write the files of weights, under the names that they have in the source; one is in memory at a time."""
    done = 0
    for file, reader in source.files.items():
        tensors = {
            name: plan.make(source, name)
            for name, (names, _) in plan.made.items()
            if source.tensors[names[0]].file == file
        }
        # else it held masks of an old checkpoint alone, which the new class does not have
        if tensors:
            save_file(tensors, folder / file, {**(reader.metadata() or {}), "format": "pt"})
        done += sum(tensor.nbytes for tensor in tensors.values())
        progress("bytes", done, nbytes)


def write_rest(
    source: Source, plan: Plan, folder: Path, report: ConversionReport, beside: list[Path]
) -> None:
    """Write everything but the weights: index, config, tokenizer, model card."""
    if source.index is not None:
        index = copy.deepcopy(source.index)
        index["weight_map"] = {
            n: source.tensors[names[0]].file for n, (names, _) in plan.made.items()
        }
        old = index.get("metadata")
        metadata = index["metadata"] = dict(old) if isinstance(old, dict) else {}
        metadata["total_size"] = report.nbytes
        if "total_parameters" in metadata:
            metadata["total_parameters"] = report.new_parameters
        create_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    made = record(source, report)
    config = {**plan.config, CONVERSION: made}
    create_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for path in beside:
        place = folder / path.relative_to(source.folder)
        place.parent.mkdir(exist_ok=True)
        with creating(place) as file:
            file.write(read_bytes(path, BESIDE_BYTES, "file"))
    create_text(folder / CARD, model_card(source.card(), made, report))


def record(source: Source, report: ConversionReport) -> dict[str, Any]:
    """Return the record of a conversion that config.json keeps."""
    folder = Path(os.path.realpath(source.folder))
    found: dict[str, Any] = {"kv_hf": __version__, "source": folder.name, "method": report.method}
    # of the hub's cache: models--<owner>--<name>/snapshots/<revision>
    if folder.parent.name == "snapshots":
        found["source"] = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        found["revision"] = folder.name
    found["num_key_value_heads"] = [report.num_kv_heads, report.new_kv_heads]
    if report.new_class:
        found["class"] = [source.config["model_type"], report.new_class]
    if history := source.config.get(CONVERSION):
        found["before"] = history
    return found


def model_card(own: str, record: dict[str, Any], report: ConversionReport) -> str:
    """Return README.md of a converted checkpoint: front matter, what was done, the source's own card (`own`) behind it.

    Args:
        record: of the conversion, as config.json keeps it; its source becomes `base_model`.
    """
    found = REGEX_YAML_BLOCK.search(own)
    head = _front_matter(found[2] if found else "", record["source"])
    own = own[found.end() :].strip() if found else own.strip()
    counts = f"{report.num_kv_heads} to {report.new_kv_heads} kv heads"
    title = f"as {report.new_class}" if report.method == "exact" else counts
    of_class = f" It is a `{report.new_class}` now." if report.new_class else ""
    measured = "" if report.method == "exact" else " How far it is from the original was not measured when it was converted."  # fmt: skip
    rows = "".join(f"| {name} | {old:,} | {new:,} |\n" for name, old, new in report.rows())
    text = (
        f"# {record['source'].rpartition('/')[2]}, {title}\n\n"
        f"Converted by kv_hf (method `{report.method}`): {WHAT[report.method]}.{of_class} {WARNING[report.method]}{measured}\n\n"
        f"| | before | after |\n| --- | ---: | ---: |\n{rows}\n"
        "It is an ordinary checkpoint of its class: transformers loads it without any code of kv_hf.\n"
    )
    return head + text + (f"\n---\n\nThe card of the original model:\n\n{own}\n" if own else "")


def _front_matter(block: str, base: str) -> str:
    """Return front matter for the hub: the source's own fields (its licence among them), with base model, library and tags.

    A block that is no YAML object is left out.
    """
    try:
        fields = yaml.safe_load(block)
    except yaml.YAMLError:
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    tags = fields.get("tags")
    own = tags if isinstance(tags, list) else []
    fields |= {"base_model": base, "library_name": "transformers"}
    fields["tags"] = [*own, *(tag for tag in ("kv_hf", "gqa") if tag not in own)]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---\n\n"
