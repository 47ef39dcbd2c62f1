"""Memory that a calibrated merge takes: a formula of the model, the method and the calibration tokens."""

from pathlib import Path

from ..errors import ConversionError
from .checkpoint import Checkpoint
from .heads import text_config
from .merge_values import holds_factors
from .structure import Structure

SINGLE, DOUBLE = 4, 8  # bytes of a number
ROOM = (
    50_000_000  # what a merge takes of any size: buffers of torch, pieces of memory between others
)
MEMORY = Path("/proc/meminfo")


def calibration_bytes(
    checkpoint: Checkpoint,
    structure: Structure,
    method: str,
    windows: int,
    tokens: int,
    *,
    samples: bool = False,
) -> int:
    """Return about how many bytes a calibrated merge takes at its peak, beside what Python and torch take.

    Args:
        method: "align" or "svd".
        windows, tokens: of calibration text: how many, and the tokens of each.
        samples: the model writes the text itself.
    """
    text = text_config(structure.old)
    heads, groups, dim = structure.num_heads, structure.new_kv_heads, structure.head_dim
    wide = structure.num_kv_heads // groups * dim  # numbers of a head's context
    hidden, query, key = text.hidden_size, heads * dim, structure.num_kv_heads * dim
    count = windows * tokens
    weights = sum(tensor.numel for tensor in checkpoint.tensors.values()) * SINGLE
    layer, around = layer_bytes(checkpoint, structure)
    loaded = weights if structure.rebuilt else layer
    window = (
        tokens
        * SINGLE
        * (4 * hidden + 3 * (getattr(text, "intermediate_size", None) or 4 * hidden))
    )
    window += 4 * heads * tokens**2 * SINGLE
    probabilities = heads * count * tokens * SINGLE
    own = 2 * (query + 2 * key) * hidden * DOUBLE  # projections, as they are solved
    grams = 2 * key**2 * DOUBLE
    seen = count * SINGLE * (2 * hidden + query + key)  # inputs, targets, queries and keys
    if method == "svd":
        fit = probabilities + count * SINGLE * (2 * query + 2 * key + 2 * hidden)
        fit += 9 * query * hidden * SINGLE + 4 * hidden**2 * DOUBLE + window
        seen += max(fit, grams)
    else:
        seen += grams
    contexts = heads * wide
    if holds_factors(heads, wide, windows, tokens):
        sums = probabilities + count * key * SINGLE
    else:
        sums = contexts**2 * (SINGLE + 2 * DOUBLE)  # of a window, the same in float64, and of all
        sums += 2 * query * contexts * DOUBLE + 2 * tokens * contexts * SINGLE
    solved = (
        (2 * groups + 8) * wide**2 * DOUBLE + 4 * query**2 * DOUBLE + 4 * hidden * query * DOUBLE
    )
    values = sums + solved + 2 * count * hidden * SINGLE + window
    merging = 2 * count * hidden * SINGLE + loaded + own + max(seen, values)
    begin = count * hidden * SINGLE + (weights if structure.rebuilt else layer + around)
    found = ROOM + max(begin, merging)
    if samples:
        written = weights + 2 * key * text.num_hidden_layers * count * SINGLE
        found = max(found, ROOM + written)
    return found


def layer_bytes(checkpoint: Checkpoint, structure: Structure) -> tuple[int, int]:
    """Return the bytes of the largest layer, and of what lies beside the layers in their model, in float32."""
    changed = next(own for own, name in structure.names.items() if name in structure.changed)
    parts = changed.split(".")
    place = next(i for i, part in enumerate(parts) if part.isdigit())
    path, base = ".".join(parts[:place]) + ".", ".".join(parts[: place - 1])
    layers: dict[str, int] = {}
    around = 0
    for own, name in structure.names.items():
        nbytes = checkpoint.tensors[name].numel * SINGLE
        if own.startswith(path):
            index = own.removeprefix(path).partition(".")[0]
            layers[index] = layers.get(index, 0) + nbytes
        elif not base or own.startswith(base + "."):
            around += nbytes
    return max(layers.values()), around


def available_bytes() -> int | None:
    """Return the memory that this machine could give a process now; None where it does not say."""
    try:
        for line in MEMORY.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def check_memory(needed: int, what: str) -> None:
    """Raise ConversionError where `what` needs more memory than there is."""
    free = available_bytes()
    if free is not None and needed > free:
        raise ConversionError(
            f"{what} needs about {gigabytes(needed)} of memory, and {gigabytes(free)} are available: use fewer or shorter "
            'windows of calibration tokens, or method="mean"'
        )


def gigabytes(nbytes: int) -> str:
    """Return bytes as text."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
