"""Calibration text as windows of token ids: from a text, or written by the model itself."""

from pathlib import Path
from typing import Any

import torch

from ..errors import ConversionError
from ..texts import longest_context, text_windows
from .checkpoint import Checkpoint
from .heads import text_config
from .structure import Structure

WINDOW, TOKENS = 512, 8192
SAMPLES = "samples"  # the source that has the model write its own text


def calibration_windows(
    checkpoint: Checkpoint, structure: Structure, source: str | Path | torch.Tensor
) -> torch.Tensor:
    """Return what to calibrate on as token ids [windows, tokens], int64.

    Args:
        source: token ids [windows, tokens]; "samples": the model's own, sampled at temperature 1 from its first token, for which
            it is loaded as a whole; or text as kv_hf.texts.load_text takes it, whose first 8,192 tokens are cut into
            windows of 512 (fewer for models with a shorter context), each begun as the tokenizer begins texts.
    Raises: ConversionError where there is no such text, or no tokenizer beside the weights.
    """
    if isinstance(source, torch.Tensor):
        if source.dim() != 2 or not source.numel() or source.dtype != torch.int64:
            raise ConversionError(
                f"calibration must be text or int64 token ids [windows, tokens], got {list(source.shape)} of {source.dtype}"
            )
        return checked(source, structure)
    tokenizer, length = tokenizer_of(checkpoint), window_of(structure)
    if source == SAMPLES:
        check_first(checkpoint, tokenizer)
        return sample(checkpoint, tokenizer.bos_token_id, TOKENS // length, length)
    try:
        found = torch.tensor(text_windows(tokenizer, source, length, TOKENS // length))
    except ValueError as error:
        raise ConversionError(f"calibration: {error}") from error
    return checked(found, structure)


def checked(windows: torch.Tensor, structure: Structure) -> torch.Tensor:
    """Return token ids [windows, tokens]. Raises ConversionError for too few of them, and ids that the model does not know."""
    count, tokens = windows.shape
    if tokens < 2 or windows.numel() < structure.head_dim:
        raise ConversionError(
            f"calibration has {count} windows of {tokens} tokens: too few to merge heads of {structure.head_dim} channels on; "
            "several thousand in windows of hundreds are of use"
        )
    known = getattr(text_config(structure.old), "vocab_size", None)
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or (known is not None and high >= known):
        raise ConversionError(
            f"calibration holds token {low if low < 0 else high}, and the model's vocabulary has {known} tokens"
        )
    return windows


def window_of(structure: Structure) -> int:
    """Return the tokens of a window of text: 512, or fewer for models with a shorter context."""
    return min(WINDOW, longest_context(structure.old))


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer of a checkpoint. Raises ConversionError without one."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(
            f"{checkpoint.folder} has no tokenizer to read calibration with: {first}"
        ) from error
    return tokenizer


def check_first(checkpoint: Checkpoint, tokenizer: Any) -> None:
    """Raise ConversionError unless the tokenizer has a token that texts begin with, for a model to write its own."""
    if tokenizer.bos_token_id is None:
        raise ConversionError(
            f"calibration {SAMPLES!r} begins with the token that begins texts, and the tokenizer of {checkpoint.folder} has none"
        )


@torch.no_grad()
def sample(checkpoint: Checkpoint, first: int, windows: int, length: int) -> torch.Tensor:
    """Return [windows, length] tokens that the model writes behind the token `first`, the same ones every time."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = model.generate(
            torch.full((windows, 1), first),
            attention_mask=torch.ones(windows, 1, dtype=torch.long),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=length - 1,
            min_new_tokens=length - 1,
            eos_token_id=None,
            pad_token_id=first,
        )
    found: torch.Tensor = rows.to(torch.int64)
    return found
