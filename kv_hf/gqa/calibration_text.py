"""Calibration text as windows of token ids: from a text, or written by the model itself."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ..errors import ConversionError, first_line
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
        from transformers import AutoModelForCausalLM

        check_first(checkpoint, tokenizer)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
        first = torch.full((TOKENS // length, 1), tokenizer.bos_token_id)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return sample_rows(model.eval(), first, length)
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
    """Return the tokenizer of a checkpoint. Raises ConversionError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = first_line(error)
    else:
        if len(tokenizer):
            return tokenizer
        why = "its vocabulary is empty"
    raise ConversionError(f"{checkpoint.folder} has no tokenizer to read text with: {why}")


def check_first(checkpoint: Checkpoint, tokenizer: Any) -> None:
    """Raise ConversionError unless the tokenizer has a token that texts begin with, for a model to write its own."""
    if tokenizer.bos_token_id is None:
        raise ConversionError(
            f"calibration {SAMPLES!r} begins with the token that begins texts, and the tokenizer of {checkpoint.folder} has none"
        )


@torch.no_grad()
def sample_rows(
    model: Any, first: torch.Tensor, length: int, ends: Collection[int] = ()
) -> torch.Tensor:
    """Return what a model writes at temperature 1, with nothing cut off or weighed otherwise; draws from torch's generator.

    Args:
        model: in evaluation mode; its own settings of generation, which transformers would add, are left out.
        first: [rows, 1], int64: the token that each row begins with.
        length: tokens of a row, the first one among them.
        ends: tokens that a row may end with.
    Returns: [rows, at most `length`], int64; behind its end a row holds one of `ends`.
    """
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        rows: torch.Tensor = model.generate(
            first, attention_mask=torch.ones_like(first), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=length - 1, eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0),
        )  # fmt: skip
    finally:
        model.generation_config = own
    return rows
