"""The distance of a contender's next-token distributions at the end of a long text from those of dense exact reading."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import DynamicCache

from kv_hf.backends import registry
from kv_hf.backends.base import AttentionCall
from kv_hf.evaluation.accuracy import PROTOCOL, summary
from kv_hf.evaluation.by_text import block_means
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.distances import Tally
from kv_hf.evaluation.loaded_model import LoadedModel, TextSettings, digest_of
from kv_hf.evaluation.teacher_forcing import forced_logits
from kv_hf.spec import LANES
from measure.reading.choosers import CHOOSERS
from measure.reading.contender import Contender
from measure.reading.simulation import Simulation, reads_by

COUNTED = "c_counted"
SIMULATED = "every query a choice of its own, exact keys and values"
Logits = Iterator[tuple[int, torch.Tensor]]


@contextmanager
def counted_pages(found: list[int]) -> Iterator[None]:
    """Register a backend COUNTED, which is the C kernel and appends to `found` how many pages each of its choices takes."""
    own = registry.load("c")
    assert own.choose_pages is not None
    choose = own.choose_pages

    def counted(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        table, counts = choose(call)
        found.extend(counts.tolist())
        return table, counts

    backend = replace(own, name=COUNTED, choose_pages=counted)
    why_not = functools.partial(registry.why_not, "c")
    registry.register_backend(
        COUNTED, lambda: backend, why_not=why_not, runs_on="cpu", layout=LANES
    )
    try:
        yield
    finally:
        registry.unregister_backend(COUNTED)


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
        counts: list[int] = []
        for position, logits in self._logits(contender, counts):
            if not torch.isfinite(logits).all():
                raise ValueError(f"{contender} gives logits that are not finite at {position}")
            part = slice(position - prompt, position - prompt + len(logits))
            tally.add(exact[part], torch.log_softmax(logits, -1), targets[part])
            progress(len(logits))
        tally.end_text()
        places = contender.places
        pages = places.sealed(self.settings.window)
        budget = contender.budget
        return {
            "kind": "reading",
            **self.known,
            "contender": contender.name,
            "simulated": contender.simulated,
            "read_tokens": contender.read_tokens,
            "read_top_p": contender.read_top_p,
            "read_from": contender.read_from,
            "page_size": places.page_size,
            "pages": pages,
            "pages_read": pages if budget is None else budget.most(pages),
            **self._tokens_read(contender, counts),
            "protocol": SIMULATED if contender.simulated else PROTOCOL,
            **asdict(summary(tally, 0.0)),
            "kl_blocks": block_means(tally.kl[0]),
        }

    def _tokens_read(self, contender: Contender, counts: list[int]) -> dict[str, float]:
        """Return how many tokens a step read, the exact window included: mean over steps and layers, and quantiles."""
        if not counts:
            return {}
        places, own = contender.places, self.settings
        exact = [places.exact(at) for at in range(own.prompt + 1, own.window + 1)]
        window = sum(exact) / len(exact)
        tokens = torch.tensor(counts, dtype=torch.float64) * places.page_size + window
        parts = {f"tokens_read_p{q}": float(tokens.quantile(q / 100)) for q in (10, 50, 90)}
        return {"tokens_read_mean": float(tokens.mean()), **parts}

    def _logits(self, contender: Contender, counts: list[int]) -> Logits:
        """Yield (position, logits [tokens, vocab]) of the scored tokens; pages of choices up to a mass go into `counts`."""
        model, own = self.loaded.model, self.settings
        prefill = self.loaded.reference(own).prefill(0)
        if not contender.simulated:
            counted = contender.read_top_p is not None
            name = f"{contender.cache},kernel={COUNTED}" if counted else contender.cache
            with counted_pages(counts) if counted else nullcontext():
                cache = cache_kind(name).make(model.config, own.window)
                yield from forced_logits(model, self.ids, cache, own.prompt, prefill=prefill)
            return
        budget = contender.budget
        assert budget is not None
        simulation = Simulation(CHOOSERS[contender.name], budget, contender.places)
        with reads_by(model, simulation):
            exact = DynamicCache(config=model.config)
            yield from forced_logits(model, self.ids, exact, own.prompt, prefill=prefill)
