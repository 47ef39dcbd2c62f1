"""Texts that caches of one model are compared on, with the exact run recorded once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ...cache.paged_cache import PagedCache
from ...cache.saved.identity import identity
from ...formats import readers_of
from ...notices import say_once
from .divergence import divergence
from .replay import Recording, find_layers, record, rerun

# A replayed run repeats the whole run's arithmetic on the same shapes, so it gives the same numbers up to the order of
# sums in matrix products. At 4 bits such noise flips codes now and then, which moves a mean KL by parts of a percent.
MOST_DIFFERENCE = 0.02


class Calibration:
    """Mean KL of caches to the exact one on fixed texts.

    Args:
        model: a causal language model in eval mode. With attention "kv_hf" the pages are read by the kernels.
        texts: token ids [tokens] of each text, on the model's device.
        prompt_tokens: tokens of each that are not scored.
        options: of CacheConfig, without formats; the same for every cache that is compared.
        fast: rerun only the layers from the lowest stored one on, where the model allows it (see replay.py).
    """

    def __init__(
        self,
        model: Any,
        texts: Sequence[torch.Tensor],
        prompt_tokens: int,
        options: Mapping[str, Any] | None = None,
        fast: bool = True,
    ) -> None:
        self.model, self.texts, self.prompt_tokens = model, list(texts), prompt_tokens
        self.options = dict(options or {})
        self.fast = fast
        self.layers = find_layers(model) if fast else None
        self.found: dict[
            str, float
        ] = {}  # KL of what was measured, by the keys of sensitivity.CellFile
        if not self.texts:
            raise ValueError("texts must hold at least one text, got none")
        check_prompt("text", prompt_tokens, self.texts)
        self.tokens = sum(len(ids) - prompt_tokens for ids in self.texts)

    def setting(self) -> dict[str, Any]:
        """Return everything that a figure depends on, the cache apart."""
        return {
            "model": identity(self.model),
            "texts": [text.tolist() for text in self.texts],
            "prompt": self.prompt_tokens,
            "options": self.options,
        }

    @cached_property
    def recordings(self) -> list[Recording]:
        """The exact runs. Raises ValueError when the model gives logits that are not finite."""
        made = []
        for ids in self.texts:
            options = with_group_sizes(self.options, (), ())
            made.append(record(self.model, ids, self.prompt_tokens, options, self.layers))
            if not torch.isfinite(made[-1].logits).all():
                raise ValueError("the model gives logits that are not finite with the exact cache")
        if not all(one.outputs for one in made):
            self.layers = None
        return made

    def work(self, lowest: int) -> int:
        """Return how many layers a measurement runs, for progress bars."""
        total = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return total - lowest if self.layers is not None else total

    def kl(
        self,
        layers: Mapping[str, Any],
        lowest: int = 0,
        *,
        whole: bool = False,
        most_texts: int | None = None,
    ) -> float:
        """Return the mean KL per token of the cache whose layers are exact but for `layers`.

        Args:
            layers: as CacheConfig.layers.
            lowest: the lowest layer that is not exact.
            whole: run the whole model, whatever is known.
            most_texts: only the first of the texts.
        Raises: ValueError when logits are not finite.
        """
        sides = {
            side: [formats[side] for formats in layers.values() if side in formats]
            for side in ("keys", "values")
        }
        options = with_group_sizes(self.options, **sides)
        found = []
        for recording in self.recordings[:most_texts]:
            cache = PagedCache(self.model.config, layers=layers, **options)
            stack = None if whole else self.layers
            for position, logits in rerun(self.model, recording, cache, lowest, stack):
                if not torch.isfinite(logits).all():
                    raise ValueError(
                        f"layers={dict(layers)} gives logits that are not finite at token {position}"
                    )
                first = position - self.prompt_tokens
                found.append(divergence(recording.logits[first : first + len(logits)], logits))
        return torch.cat(found).mean().item()

    def check_replay(self, layers: Mapping[str, Any], lowest: int) -> None:
        """Go over to whole runs where a replayed one gives another result on the first text; say so."""
        _ = self.recordings
        if self.layers is None:
            return
        fast = self.kl(layers, lowest, most_texts=1)
        whole = self.kl(layers, lowest, whole=True, most_texts=1)
        if abs(fast - whole) > MOST_DIFFERENCE * whole + 1e-9:
            self.layers = None
            say_once(
                f"replay of {type(self.model).__name__}",
                f"kv_hf: {type(self.model).__name__} is measured in whole runs: rerunning its upper layers alone gave "
                f"KL {fast:.3g} instead of {whole:.3g}",
            )


def check_prompt(argument: str, prompt_tokens: int, texts: Sequence[torch.Tensor]) -> None:
    """Raise ValueError where one of `texts` [tokens] of `argument` has no token behind the prompt, or there is no prompt."""
    for ids in texts:
        if not 1 <= prompt_tokens < len(ids):
            raise ValueError(
                f"prompt must be between 1 and {len(ids) - 1} tokens for a {argument} of {len(ids)}, got {prompt_tokens}"
            )


def with_group_sizes(
    options: Mapping[str, Any], keys: Sequence[str], values: Sequence[str]
) -> dict[str, Any]:
    """Return `options` without the group sizes that no format of a cache reads, which CacheConfig refuses."""
    read = {"key_group_size": keys, "value_group_size": values}
    return {
        name: value
        for name, value in options.items()
        if name not in read or set(readers_of(name)) & set(read[name])
    }
