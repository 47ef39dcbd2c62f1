"""The checks before a calibrated merge begins: its text, the model, and the memory that it takes."""

from pathlib import Path

import torch

from .calibrated import check_calibrated
from .calibration_text import (
    SAMPLES,
    TOKENS,
    calibration_windows,
    check_first,
    tokenizer_of,
    window_of,
)
from .checkpoint import Checkpoint
from .memory import calibration_bytes, check_memory
from .structure import Structure


def ready_to_calibrate(
    checkpoint: Checkpoint,
    structure: Structure,
    method: str,
    calibration: str | Path | torch.Tensor,
    dry_run: bool,
) -> tuple[torch.Tensor, int]:
    """Return the token ids to calibrate on [windows, tokens], and about how many bytes of memory the merge takes.

    A dry run has the model write no text: ids of "samples" are then its first token over and over, and only their number
    is right. It looks at a layer of each kind instead, which a conversion does when it begins.

    Raises: ConversionError for text that cannot be had, models that cannot be calibrated, and too little memory.
    """
    samples = isinstance(calibration, str) and calibration == SAMPLES
    if samples:
        tokenizer, length = tokenizer_of(checkpoint), window_of(structure)
        check_first(checkpoint, tokenizer)
        windows = torch.full((TOKENS // length, length), tokenizer.bos_token_id)
    else:
        windows = calibration_windows(checkpoint, structure, calibration)
    count, tokens = windows.shape
    needed = calibration_bytes(checkpoint, structure, method, count, tokens, samples=samples)
    check_memory(needed, f"method {method!r} on {checkpoint.name} with {count} windows of {tokens}")
    if dry_run:
        check_calibrated(checkpoint, structure, method, windows)
    elif samples:
        windows = calibration_windows(checkpoint, structure, calibration)
    return windows, needed
