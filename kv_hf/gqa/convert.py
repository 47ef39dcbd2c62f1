"""Convert a checkpoint to fewer kv heads: a map over its files of weights, written aside and renamed."""

import json
import os
import tempfile
from collections.abc import Callable
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
from .renames import ROUTES
from .source import CARD, INDEX, SINGLE, Source
from .stream import calibration_windows
from .structure import (
    Made,
    Structure,
    build,
    config_of,
    find_names,
    find_structure,
    pooled_tensors,
)
from .svd import calibrate

METHODS = ("mean", "svd")
Progress = Callable[[str, int, int], object]  # (unit, done, of)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WHAT = {
    "mean": "The key and value projections of each group of heads were replaced by their mean (GQA, arXiv 2305.13245).",
    "svd": "The heads of each group were replaced by their principal components on calibration text, and queries, keys and "
    "outputs fitted to what the original computes there.",
    "exact": "No heads were merged.",
}
# no figures: those of another model would read as if they were this one's
WARNING = {
    "mean": "Without further training such a model is of little use.",
    "svd": "It needs further training to come near the original.",
}


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion: planned, or done.

    Attributes:
        source, destination: as given.
        method: how heads were merged; "exact" where none was.
        num_kv_heads, new_kv_heads: of a layer.
        changed: tensors that were not copied byte for byte.
        parameters, new_parameters: numbers in all tensors.
        kv_bytes_per_token, new_kv_bytes_per_token: of a cache in bf16, all layers.
        nbytes: bytes of the new weights.
        notes: what else the user should know.
    """

    source: str
    destination: str
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
        rows = (
            ("kv heads of a layer", self.num_kv_heads, self.new_kv_heads),
            (
                "bytes of a token's keys and values (bf16)",
                self.kv_bytes_per_token,
                self.new_kv_bytes_per_token,
            ),
            ("parameters", self.parameters, self.new_parameters),
        )
        lines = [f"| {name:<41} | {old:>15,} | {new:>15,} |" for name, old, new in rows]
        head = f"| {'':<41} | {'before':>15} | {'after':>15} |"
        return "\n".join([head, f"| {'-' * 41} | {'-' * 14}: | {'-' * 14}: |", *lines])


@dataclass(frozen=True)
class Plan:
    """A conversion, ready to run.

    Attributes:
        made: tensors of the result by name -> (names on disk, what makes them of these; None copies).
        config: config.json of the result, without the record of the conversion.
        structure: of a conversion within a class; None where the class changes.
        kv_heads: before and after.
        kv_bytes: of a token's keys and values, in bf16.
        method: how heads are merged.
        notes: what the user should know.
        new_class: class of the result where it is another one.
        dtype: of all weights of the result; None keeps each one's own.
    """

    made: Made
    config: dict[str, Any]
    structure: Structure | None
    kv_heads: tuple[int, int]
    kv_bytes: int
    method: str
    notes: tuple[str, ...]
    new_class: str = ""
    dtype: torch.dtype | None = None

    def dtype_of(self, source: Source, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the result."""
        own = source.tensors[self.made[name][0][0]].dtype
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def make(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return one tensor of the result [any shape], of what `read` returns for names on disk; not cast yet."""
        names, how = self.made[name]
        tensors = [read(each) for each in names]
        found: torch.Tensor = tensors[0] if how is None else how(*tensors)
        return found


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
    check_choice("method", method, METHODS)
    if (method == "svd") != (calibration is not None):
        wrong = "needs" if method == "svd" else "reads no"
        raise ConversionError(
            f"method {method!r} {wrong} calibration text: give calibration with svd"
        )
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    opened = Source.open(source)
    plan = make_plan(opened, num_kv_heads, method)
    if dtype is not None:
        plan = _with_dtype(plan, dtype)
    check_destination(Path(destination), opened.folder)
    beside = opened.beside()
    windows = None
    if plan.method == "svd" and plan.structure is not None:
        windows = calibration_windows(opened, plan.structure, calibration)
    report = make_report(opened, plan, str(destination))
    if dry_run:
        return report
    try:
        with becoming_folder(Path(destination)) as folder, scratch_folder(folder) as scratch:
            if windows is not None and plan.structure is not None:
                plan.made.update(calibrate(opened, plan.structure, windows, scratch, progress))
                report = replace(report, changed=changed_tensors(plan))
            write_weights(opened, plan, folder, report.nbytes, progress)
            write_rest(opened, plan, folder, report, beside)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConversionError(
            f"destination {str(destination)!r} cannot be written: {why}"
        ) from error
    return report


def make_plan(source: Source, num_kv_heads: int, method: str) -> Plan:
    """Return the plan of a conversion. Raises ConversionError for models that cannot be converted, with the reason."""
    if source.config.get("model_type") in ROUTES:
        return _plan_renames(source, num_kv_heads, method)
    structure = find_structure(source, num_kv_heads)
    unknown = structure.names.unknown
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    note = (
        f"the class does not have {unknown[:1]}{more}: copied as they are, with all their kv heads"
    )
    rows = sum(
        part.heads * part.rows
        for name, parts in structure.parts.items()
        for part in parts
        if part.kind in ("key", "value") and name.endswith("weight")
    )
    return Plan(
        made=pooled_tensors(source, structure),
        config=structure.new_json,
        structure=structure,
        kv_heads=(structure.num_kv_heads, num_kv_heads),
        kv_bytes=2 * rows,
        method=method,
        notes=(note, WARNING[method]) if unknown else (WARNING[method],),
    )


def _plan_renames(source: Source, num_kv_heads: int, method: str) -> Plan:
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
    made = route.tensors(config, num_kv_heads, names.on_disk)
    used = {each for sources, _ in made.values() for each in sources}
    lost = [name for own, name in names.on_disk.items() if own not in used]
    if lost := lost + names.rebuilt + names.unknown:
        raise ConversionError(f"{source.folder} holds {lost[0]!r}, which would be lost")
    found = json.loads(new.to_json_string(use_diff=True))
    for name in ("dtype", "torch_dtype", "tokenizer_class", "task_specific_params"):
        if name in source.config:
            found[name.removeprefix("torch_")] = source.config[name]
    said = "which computes the same as" if exact else "as no grouped kv heads are known to"
    note = f"the result is a {route.target}, {said} {route.source}"
    return Plan(
        made={
            name: (tuple(names.on_disk[each] for each in sources), how)
            for name, (sources, how) in made.items()
        },
        config=found,
        structure=None,
        kv_heads=(heads, num_kv_heads),
        kv_bytes=2 * 2 * config.num_hidden_layers * config.hidden_size,
        method="exact" if exact else method,
        notes=(note,) if exact else (note, WARNING[method]),
        new_class=route.target,
    )


def _with_dtype(plan: Plan, dtype: str) -> Plan:
    """Return the plan with all weights in a dtype, which config.json and those of its parts that have one say."""
    config = plan.config
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    return replace(plan, dtype=DTYPES[dtype])


def changed_tensors(plan: Plan) -> tuple[str, ...]:
    """Return the names of the tensors that are not copied."""
    return tuple(name for name, (_, how) in plan.made.items() if how is not None)


def make_report(source: Source, plan: Plan, destination: str) -> ConversionReport:
    """Return the report of a plan that was not run yet; its tensors are made on the meta device."""
    numbers = {n: plan.make(n, source.tensors.__getitem__).numel() for n in plan.made}
    old, new = plan.kv_heads
    return ConversionReport(
        source=source.name,
        destination=destination,
        method=plan.method,
        num_kv_heads=old,
        new_kv_heads=new,
        changed=changed_tensors(plan),
        parameters=sum(tensor.numel() for tensor in source.tensors.values()),
        new_parameters=sum(numbers.values()),
        kv_bytes_per_token=plan.kv_bytes,
        new_kv_bytes_per_token=plan.kv_bytes * new // old,
        nbytes=sum(plan.dtype_of(source, name).itemsize * n for name, n in numbers.items()),
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
    """Return a tensor [any shape] in another dtype, contiguous. Raises ConversionError where finite numbers would become infinite."""
    found = tensor.to(dtype).contiguous()
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
            name: cast(name, plan.make(name, source.read), plan.dtype_of(source, name))
            for name, (names, _) in plan.made.items()
            if source.places[names[0]] == file
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
    if SINGLE not in source.files:
        places = {name: source.places[names[0]] for name, (names, _) in plan.made.items()}
        index = {"metadata": {"total_size": report.nbytes}, "weight_map": places}
        create_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    made = record(source, plan)
    config = {**plan.config, CONVERSION: made}
    create_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for path in beside:
        place = folder / path.relative_to(source.folder)
        place.parent.mkdir(exist_ok=True)
        with creating(place) as file:
            file.write(read_bytes(path, BESIDE_BYTES, "file"))
    create_text(folder / CARD, model_card(source.card(), made["source"], report))


def record(source: Source, plan: Plan) -> dict[str, Any]:
    """Return the record of a conversion that config.json keeps."""
    folder = Path(os.path.realpath(source.folder))
    found: dict[str, Any] = {"kv_hf": __version__, "source": folder.name, "method": plan.method}
    # of the hub's cache: models--<owner>--<name>/snapshots/<revision>
    if folder.parent.name == "snapshots":
        found["source"] = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        found["revision"] = folder.name
    found["num_key_value_heads"] = list(plan.kv_heads)
    if plan.new_class:
        found["class"] = [source.config["model_type"], plan.new_class]
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
        fields = yaml.safe_load(block[2]) if block else None
    except yaml.YAMLError:
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    found = fields.get("tags")
    tags = found if isinstance(found, list) else []
    fields |= {"base_model": base, "library_name": "transformers"}
    fields["tags"] = [*tags, *(tag for tag in ("kv_hf", "gqa") if tag not in tags)]
    head = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    own = own[block.end() :].strip() if block else own.strip()
    behind = f"\n---\n\nThe card of the original model:\n\n{own}\n" if own else ""
    notes = "".join(f"- {note}\n" for note in report.notes)
    return (
        f"---\n{head}---\n\n# {base.rpartition('/')[2]}, {report.num_kv_heads} to {report.new_kv_heads} kv heads\n\n"
        f"Converted by kv_hf (method `{report.method}`). {WHAT[report.method]} How far it is from the original was not measured.\n\n"
        f"{report.table()}\n\n{notes}\n"
        f"It is an ordinary checkpoint of its class: transformers loads it without any code of kv_hf.\n{behind}"
    )
