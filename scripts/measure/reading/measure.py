"""The distance of a contender's next-token distributions at the end of a long text from those of dense exact reading."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from transformers import DynamicCache

from kv_hf.evaluation.accuracy import PROTOCOL, summary
from kv_hf.evaluation.by_text import block_means
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.distances import Tally
from kv_hf.evaluation.loaded_model import LoadedModel, TextSettings, digest_of
from kv_hf.evaluation.teacher_forcing import forced_logits
from measure.reading.choosers import CHOOSERS
from measure.reading.contender import Contender
from measure.reading.simulation import Simulation, reads_by

SIMULATED = "every query a choice of its own, exact keys and values"
Logits = Iterator[tuple[int, torch.Tensor]]


class ReadingBench:
    """The end of one text, read by contenders, all of which begin with the same exact prefill.

    Args:
        loaded: the model.
        text: a bundled text or a file.
        length, scored: tokens of the text, and how many of the last ones are scored.
    Raises: ValueError for a text that is too short, and one that is longer than the model reads.
    """

    def __init__(self, loaded: LoadedModel, text: str, length: int, scored: int) -> None:
        self.loaded = loaded
        self.settings = TextSettings(text, 1, length, length - scored)
        self.ids = next(iter(loaded.windows(self.settings).values()))[0]

    @property
    def known(self) -> dict[str, Any]:
        """What rows say of the text: the fields that decide a figure beside model and contender."""
        own = self.settings
        return {
            "text": own.text,
            "text_digest": digest_of([self.ids]),
            "window": own.window,
            "prompt": own.prompt,
        }

    def measure(
        self, contender: Contender, progress: Callable[[int], object] = lambda tokens: None
    ) -> dict[str, Any]:
        """Return the fields of a row: the contender's distances (those of `Accuracy`), and what it reads.

        Args:
            progress: called with the tokens scored since the last call.
        Raises: ValueError for logits that are not finite.
        """
        prompt = self.settings.prompt
        reference = self.loaded.reference(self.settings)
        exact, tally = reference.log_probs(0), Tally()
        targets = self.ids[prompt + 1 :]
        for position, logits in self._logits(contender):
            if not torch.isfinite(logits).all():
                raise ValueError(f"{contender} gives logits that are not finite at {position}")
            part = slice(position - prompt, position - prompt + len(logits))
            tally.add(exact[part], torch.log_softmax(logits, -1), targets[part])
            progress(len(logits))
        tally.end_text()
        pages = contender.places.sealed(self.settings.window)
        budget = contender.budget
        return {
            "kind": "reading",
            **self.known,
            "contender": contender.name,
            "simulated": contender.simulated,
            "read_tokens": contender.read_tokens,
            "read_from": contender.read_from,
            "page_size": contender.places.page_size,
            "pages": pages,
            "pages_read": pages if budget is None else budget.most(pages),
            "protocol": SIMULATED if contender.simulated else PROTOCOL,
            **asdict(summary(tally, 0.0)),
            "kl_blocks": block_means(tally.kl[0]),
        }

    def _logits(self, contender: Contender) -> Logits:
        """Yield (position, logits [tokens, vocab]) of the scored tokens."""
        model, own = self.loaded.model, self.settings
        prefill = self.loaded.reference(own).prefill(0)
        if not contender.simulated:
            cache = cache_kind(contender.cache).make(model.config, own.window)
            yield from forced_logits(model, self.ids, cache, own.prompt, prefill=prefill)
            return
        budget = contender.budget
        assert budget is not None
        simulation = Simulation(CHOOSERS[contender.name], budget, contender.places)
        with reads_by(model, simulation):
            exact = DynamicCache(config=model.config)
            yield from forced_logits(model, self.ids, exact, own.prompt, prefill=prefill)
