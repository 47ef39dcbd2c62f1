"""Calibration text as windows of token ids."""

from pathlib import Path
from typing import Any

import torch

from ..errors import ConversionError
from ..texts import longest_context, text_windows
from .checkpoint import Checkpoint
from .structure import Structure

WINDOW, TOKENS = 512, 8192


def calibration_windows(
    checkpoint: Checkpoint, structure: Structure, source: str | Path | torch.Tensor
) -> torch.Tensor:
    """Return what to calibrate on as token ids [windows, tokens], int64.

    Args:
        source: token ids [windows, tokens]; or text as kv_hf.texts.load_text takes it, whose first 8,192 tokens are cut into
            windows of 512 (fewer for models with a shorter context), each begun as the tokenizer begins texts.
    Raises: ConversionError where there is no such text, or no tokenizer beside the weights.
    """
    if isinstance(source, torch.Tensor):
        if source.dim() != 2 or not source.numel() or source.dtype != torch.int64:
            raise ConversionError(
                f"calibration must be text or int64 token ids [windows, tokens], got {list(source.shape)} of {source.dtype}"
            )
        return source
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(
            f"{checkpoint.folder} has no tokenizer to read calibration with: {first}"
        ) from error
    length = min(WINDOW, longest_context(structure.old))
    try:
        return torch.tensor(text_windows(tokenizer, source, length, TOKENS // length))
    except ValueError as error:
        raise ConversionError(f"calibration: {error}") from error
