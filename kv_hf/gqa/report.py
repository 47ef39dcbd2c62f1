"""The report of a conversion, for users, for config.json and for the model card."""

from dataclasses import dataclass
from typing import Any

from ..records import CONVERSION
from ..version import __version__
from .checkpoint import Checkpoint
from .plan import Plan


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
        memory: bytes that a calibrated method takes at its peak, about; 0 for the others, which hold a tensor at a time.
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
    memory: int = 0
    seconds: float = 0.0


def make_report(
    checkpoint: Checkpoint, plan: Plan, destination: str, method: str
) -> ConversionReport:
    """Return the report of a plan that was not run yet."""
    heads, kv_heads, new_kv_heads = plan.counts
    return ConversionReport(
        source=checkpoint.name,
        destination=destination,
        method="exact" if plan.exact else method,
        num_heads=heads,
        num_kv_heads=kv_heads,
        new_kv_heads=new_kv_heads,
        changed=plan.changed,
        parameters=sum(tensor.numel for tensor in checkpoint.tensors.values()),
        new_parameters=sum(recipe.numel for recipe in plan.recipes.values()),
        kv_bytes_per_token=plan.kv_bytes[0],
        new_kv_bytes_per_token=plan.kv_bytes[1],
        files=len({recipe.file for recipe in plan.recipes.values()}),
        nbytes=plan.nbytes,
        new_class=plan.new_class,
        notes=plan.notes,
    )


def record(checkpoint: Checkpoint, report: ConversionReport) -> dict[str, Any]:
    """Return the record of a conversion that config.json keeps."""
    folder = checkpoint.folder.resolve()
    found: dict[str, Any] = {"kv_hf": __version__, "source": folder.name, "method": report.method}
    if (
        folder.parent.name == "snapshots"
    ):  # of the hub's cache: models--<owner>--<name>/snapshots/<revision>
        found["source"] = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        found["revision"] = folder.name
    found["num_key_value_heads"] = [report.num_kv_heads, report.new_kv_heads]
    if report.new_class:
        found["class"] = [checkpoint.config["model_type"], report.new_class]
    history = checkpoint.config.get(CONVERSION)
    if history:
        found["before"] = history
    return found
