"""The check that the installed transformers has the seams that kv_hf relies on, and that they are the tested ones."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation import configuration_utils

from ..cache.compat import MINIMUM
from ..formats import ATTENTION_NAME, cache_names
from ..hf.install import original
from .findings import BROKEN, NOTE, OK, WARNING, Finding
from .fingerprints import KNOWN
from .seam_list import SEAMS, TESTED, Seam
from .source import fingerprint, fingerprint_of_source, methods_called

CHANGED = "changed since the versions that were tested; may still work"
EXPAND = "expand_kv of all models"
GENERATION = "generation.utils:GenerationMixin."


def check_version(found: str | None = None) -> Finding:
    """Say whether a version of transformers lies within the tested ones."""
    found = transformers.__version__ if found is None else found
    own = Version(found)
    tested = f"tested with {' and '.join(TESTED)}"
    if own < Version(MINIMUM):
        return Finding("transformers", BROKEN, f"{found}; kv_hf needs {MINIMUM} or newer")
    if own > Version(TESTED[-1]):
        return Finding("transformers", WARNING, f"{found} is newer than what kv_hf was {tested}")
    if found in TESTED:
        return Finding("transformers", OK, f"{found}, {tested}")
    return Finding("transformers", OK, f"{found} lies within what kv_hf was {tested}")


def check_seams() -> list[Finding]:
    """Return a finding for each seam: there and as tested, changed, or missing."""
    found = [check_seam(seam) for seam in SEAMS]
    return [*found, *check_registration(), *check_layers(), check_expansion()]


def check_seam(seam: Seam) -> Finding:
    """Look at one seam: is it there, does it know its parameters, is its source a tested one?"""
    if Version(transformers.__version__) < Version(seam.since):
        return Finding(seam.name, NOTE, f"came with {seam.since}; {seam.use}")
    try:
        value = locate(seam)
    except (ImportError, AttributeError) as error:
        return Finding(seam.name, BROKEN, f"missing ({error}); it {seam.use}")
    if seam.parameters is not None:
        reason = _why_not_callable(value, seam.parameters)
        if reason:
            return Finding(seam.name, BROKEN, f"{reason}; it {seam.use}")
    if not seam.told:
        return Finding(seam.name, OK, f"found; {seam.use}")
    return _compared(seam, value)


def locate(seam: Seam) -> Any:
    """Return what a seam names, below kv_hf's own patches. Raises ImportError or AttributeError where it is missing."""
    module, _, path = seam.place.partition(":")
    if seam.place.startswith(GENERATION):
        return original(path.rpartition(".")[2])
    value: Any = importlib.import_module(f"transformers.{module}")
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _why_not_callable(value: Any, parameters: tuple[str, ...]) -> str | None:
    if not callable(value):
        return f"it is a {type(value).__name__}, not a function"
    try:
        takes = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return None
    lacking = [name for name in parameters if name not in takes]
    if lacking:
        return f"it does not take {', '.join(lacking)} (but {', '.join(takes) or 'nothing'})"
    return None


def _compared(seam: Seam, value: Any) -> Finding:
    """Compare the source of a function with the tested ones."""
    foreign = getattr(value, "__module__", None) or ""
    if not foreign.startswith("transformers."):
        return Finding(seam.name, WARNING, f"replaced by {foreign or 'somebody'}; it {seam.use}")
    own = fingerprint(value)
    if own is None:
        return Finding(seam.name, NOTE, f"found, its source is not there to compare; {seam.use}")
    same = [version for version in TESTED if KNOWN[seam.place].get(version) == own]
    if same:
        return Finding(seam.name, OK, f"as in {' and '.join(same)}; {seam.use}")
    return Finding(seam.name, WARNING, f"{CHANGED}; it {seam.use}")


def check_registration() -> list[Finding]:
    """Say whether kv_hf's names are known to transformers."""
    names = getattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", ())
    lacking = [name for name in cache_names() if name not in names]
    lacking += [
        f"{kind.__name__} {ATTENTION_NAME!r}"
        for kind in (AttentionInterface, AttentionMaskInterface)
        if ATTENTION_NAME not in kind()
    ]
    if lacking:
        detail = f"not registered: {', '.join(lacking)}; call kv_hf.install()"
        return [Finding("registration", BROKEN, detail)]
    return [Finding("registration", OK, "the cache names and the attention are registered")]


def check_layers() -> list[Finding]:
    """Look at the layers that a DynamicCache makes: pages take the place of some of them by class and attributes."""
    name = "layers of DynamicCache"
    try:
        kinds = ["full_attention", "sliding_attention"]
        made: Any = transformers.LlamaConfig
        config = made(num_hidden_layers=2, layer_types=kinds, sliding_window=8)
        full, sliding = transformers.DynamicCache(config=config).layers
    except Exception as error:  # whatever a changed cache raises is what is looked for here
        said = (str(error).splitlines() or [""])[0]
        return [Finding(name, BROKEN, f"cannot be made: {type(error).__name__}: {said}")]
    wrong = [
        f"{type(layer).__name__} has no {attribute}"
        for layer, attributes in (
            (full, ("keys", "values", "is_initialized", "is_sliding")),
            (sliding, ("sliding_window", "is_sliding")),
        )
        for attribute in attributes
        if not hasattr(layer, attribute)
    ]
    expected = ("DynamicLayer", "DynamicSlidingWindowLayer")
    got = (type(full).__name__, type(sliding).__name__)
    if got != expected:
        wrong.append(f"they are {' and '.join(got)}, not {' and '.join(expected)}")
    status = BROKEN if wrong else OK
    return [Finding(name, status, "; ".join(wrong) or "classes and attributes as expected")]


def check_expansion() -> Finding:
    """Compare `expand_kv` of all models with multi-head latent attention, in their source: kv_hf absorbs that one."""
    models = Path(transformers.__file__).parent / "models"
    known = set(KNOWN[EXPAND].values())
    found, others = 0, []
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "expand_kv" not in text:
            continue
        for source in methods_called("expand_kv", text):
            found += 1
            if fingerprint_of_source(source) not in known:
                others.append(path.parent.name)
    use = "attention over latents computes what it computes"
    if not found:
        if not any(models.glob("*/modeling_*.py")):
            return Finding(EXPAND, NOTE, "the source of the models is not there to compare")
        return Finding(EXPAND, BROKEN, f"missing in all models; {use}")
    if others:
        return Finding(EXPAND, WARNING, f"{CHANGED}: {', '.join(others)}; {use}")
    return Finding(EXPAND, OK, f"{found} found, all as tested; {use}")


def known_of_installed() -> dict[str, str | None]:
    """Return the fingerprints of the installed version, to be put into fingerprints.py once all tests passed with it."""
    prints = {seam.place: fingerprint(locate(seam)) for seam in SEAMS if seam.told}
    path = Path(transformers.__file__).parent / "models/deepseek_v3/modeling_deepseek_v3.py"
    expand = methods_called("expand_kv", path.read_text(encoding="utf-8"))[0]
    return {**prints, EXPAND: fingerprint_of_source(expand)}
