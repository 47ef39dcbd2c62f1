"""The checkpoint that an uptraining writes: the student's files, new weights, a record of what was done."""

import json
from pathlib import Path
from typing import Any

import torch

from ...records import UPTRAINING
from ...version import __version__
from ..beside import CARD, copy_files, files_beside
from ..card import read_card
from ..writer import becoming
from .models import Pair, stored_dtype
from .progress import states, writing

BESIDE_WEIGHTS = 1 << 18  # bytes of a state that are no weights: random numbers, losses, headers


def round_to_stored(model: Any, dtype: torch.dtype) -> None:
    """Round a model's weights to the dtype that they will be written in, so that what is evaluated is what is written."""
    if dtype != torch.float32:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point() and tensor.requires_grad:
                    tensor.copy_(tensor.to(dtype))


def bytes_needed(pair: Pair, work: Path) -> int:
    """Return the bytes that a run writes at most, beside those of its windows: two states, of which one is being saved, and the result.

    A state holds the weights and two sums of each in fp32. What `work` has of an earlier run counts as free.
    """
    weights = sum(each.nbytes // each.dtype.itemsize for each in pair.student.tensors.values())
    there = sum(file.stat().st_size for state in states(work) for file in state.iterdir())
    return max(0, 2 * (3 * 4 * weights + BESIDE_WEIGHTS) + pair.student.nbytes - there)


def write_checkpoint(destination: Path, pair: Pair, model: Any, record: dict[str, Any]) -> None:
    """Write `destination`, aside and renamed; the model's weights take the dtype of the student's.

    Args:
        record: for config.json and the card.
    """
    beside = files_beside(pair.student.folder)
    model.to(stored_dtype(pair.student))
    with becoming(destination) as folder:
        with writing(f"destination {str(destination)!r}", folder):
            model.save_pretrained(folder)
        copy_files(pair.student.folder, folder, beside)
        # the student's config, as it was: transformers would write what a loaded config became
        config = json.loads(json.dumps(pair.student.config))
        config.pop("_name_or_path", None)
        before = config.get(UPTRAINING)
        config[UPTRAINING] = {
            "kv_hf": __version__,
            **record,
            **({"before": before} if before else {}),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        (folder / CARD).write_text(_card(pair, record), "utf-8")


def _card(pair: Pair, record: dict[str, Any]) -> str:
    head, own = read_card(pair.student.folder)
    before, after = record["before_training"], record["after_training"]
    name = Path(record["student"]).name
    text = (
        f"# {name}, uptrained\n\n"
        f"Trained by kv_hf for {record['steps']:,} steps ({record['tokens']:,} tokens) towards the logits of "
        f"`{record['teacher']}` (weight {record['alpha']:g}) and the text (weight {1 - record['alpha']:g}); parameters trained: "
        f"{record['train']}; text: {', '.join(record['data'])}.\n\n"
        f"On {after['scored']:,} held-out tokens ({record['held_out']}):\n\n"
        "| | before | after | original |\n| --- | ---: | ---: | ---: |\n"
        f"| perplexity | {before['perplexity']:,.3f} | {after['perplexity']:,.3f} | {after['teacher_perplexity']:,.3f} |\n"
        f"| KL to the original, nats | {before['kl']:.4f} | {after['kl']:.4f} | 0 |\n\n"
        "It is an ordinary checkpoint of its class: transformers loads it without any code of kv_hf.\n"
    )
    behind = (
        f"\n---\n\nThe card of the model before this training:\n\n{own.strip()}\n"
        if own.strip()
        else ""
    )
    return head + text + behind
