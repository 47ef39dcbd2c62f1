"""The exact cache's distributions of some texts, computed once for all subjects where memory allows."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from .prefill import Prefill
from .teacher_forcing import forced_logits

KEPT_BYTES = 6 << 30  # of log-probabilities; what goes beyond it is computed anew for each subject


class ExactReference:
    """Log-probabilities of `texts` behind their prompts, read through transformers' DynamicCache.

    Args:
        model: a causal language model in eval mode.
        texts: token ids [tokens] of each text, on the model's device.
        prompt_tokens: tokens of each text that are not scored.
        kept_bytes: bytes of results that may stay in memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[torch.Tensor],
        prompt_tokens: int,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.model = model
        self.texts = list(texts)
        self.prompt_tokens = prompt_tokens
        self._left = kept_bytes
        self._kept: dict[int, torch.Tensor] = {}
        self._prefills: dict[int, Prefill] = {}

    def prefill(self, number: int) -> Prefill:
        """Return the prefill of text `number`, with which every subject begins."""
        if number not in self._prefills:
            ids = self.texts[number][None, : self.prompt_tokens]
            self._prefills[number] = Prefill(self.model, ids)
        return self._prefills[number]

    def log_probs(self, number: int) -> torch.Tensor:
        """Return the log-probabilities of text `number`: fp32 [scored tokens, vocab] on the model's device.

        Raises: ValueError when the model itself gives logits that are not finite.
        """
        if number in self._kept:
            return self._kept[number]
        ids = self.texts[number]
        cache = DynamicCache(config=self.model.config)
        parts = []
        for position, logits in forced_logits(
            self.model, ids, cache, self.prompt_tokens, prefill=self.prefill(number)
        ):
            if not torch.isfinite(logits).all():
                raise ValueError(
                    f"the model gives logits that are not finite at token {position}, with the exact cache: nothing can "
                    "be compared with them"
                )
            parts.append(torch.log_softmax(logits, -1))
        found = torch.cat(parts)
        if found.nbytes <= self._left:
            self._left -= found.nbytes
            self._kept[number] = found
        return found
