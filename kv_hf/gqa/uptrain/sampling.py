"""Text sampled from the teacher, where real text is scarce: kept on disk, block by block."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...files.reading import ROWS_BYTES, read_json
from ...files.writing import replace_text
from ...user_dir import check_writable, user_dir
from ..calibration_text import sample_rows
from .models import Pair, digest
from .windows import begins_with_bos

ROWS = 64  # documents that are sampled at a time: a block


def sample_folder(pair: Pair, length: int, seed: int) -> Path:
    """Return the folder under $KV_HF_HOME that samples of this teacher are kept in."""
    return user_dir() / "samples" / f"{digest(pair.teacher)}-{length}-{seed}"


def sampled(
    teacher: Callable[[], Any],
    pair: Pair,
    tokens: int,
    length: int,
    seed: int,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Iterator[list[int]]:
    """Yield documents sampled from the teacher (temperature 1, nothing cut off) until they have `tokens` tokens.

    Each is of `length` tokens at most and begins as the tokenizer begins texts, or with a random token. Blocks that an earlier run
    has sampled are read; what is sampled depends on the teacher, `length`, `seed` and the number of the block only (and on how the machine rounds).

    Args:
        teacher: returns the model, called when a block has to be sampled.
        progress: called with (tokens that there are, tokens).
    Raises: KVCacheError where $KV_HF_HOME cannot be written to, before anything is sampled.
    """
    folder = sample_folder(pair, length, seed)
    check_writable(folder)
    count, block = 0, 0
    while count < tokens:
        path = folder / f"block-{block:06}.json"
        if path.is_file():
            found = read_json(path, ROWS_BYTES, "samples")
        else:
            found = sample_block(teacher(), pair.tokenizer, length, seed * 1_000_003 + block)
            replace_text(path, json.dumps(found))
        for ids in found:
            if count < tokens:
                count += len(ids)
                yield ids
        block += 1
        progress(min(count, tokens), tokens)


def sample_block(teacher: Any, tokenizer: Any, length: int, seed: int) -> list[list[int]]:
    """Return ROWS documents sampled from a model."""
    device, bos = teacher.device, begins_with_bos(tokenizer)
    own = teacher.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id} | (set(own) if isinstance(own, list) else {own})
    ends.discard(None)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        if bos:
            first = torch.full((ROWS, 1), tokenizer.bos_token_id)
        else:
            plain = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
            first = torch.tensor(plain)[torch.randint(len(plain), (ROWS, 1))]
        rows = sample_rows(teacher, first.to(device), length, ends).tolist()
    found = []
    for row in rows:
        end = next((i for i, token in enumerate(row) if i and token in ends), len(row))
        found.append(row[:end] if bos else row[: end + 1])
    return found
