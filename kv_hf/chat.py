"""A conversation: messages in, text out, over one cache that keeps what a turn has in common with the turns before it."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteriaList, TextIteratorStreamer

from .cache.paged_cache import PagedCache
from .cache.prefix_store import PrefixStore
from .errors import CacheOptionError, InterruptedForwardError

NEW_TOKENS = 512


class Chat:
    """A conversation with a model.

        chat = kv_hf.Chat(model, tokenizer, cache="paged_int4", system="Answer in one sentence.")
        print(chat("Name a river in France."))
        for piece in chat.stream("And where does it end?"):
            print(piece, end="", flush=True)
        print(chat.cache)

    Each turn passes the whole text, of which only the tokens that the cache does not hold yet are computed. Where the
    template writes earlier turns otherwise than they were generated (reasoning is left out, say), or `messages` was
    changed, the common beginning is kept. A turn that fails, or is interrupted, leaves `messages` as they were.

    Args:
        model: a causal language model in eval mode; one conversation computes at a time.
        tokenizer: its tokenizer, with a chat template.
        cache: name of a cache, see docs/options.md.
        system: text of a system message; None: none.
        store: keeps the pages of beginnings that several conversations share, a long system message say.
        options: of the cache, as in `cache_config`.
    Attributes:
        messages: dicts of "role" and "content", as chat templates take them. They may be changed between turns.
        cache: holds the tokens of the last turn.
    Raises: CacheOptionError for a tokenizer without a template, an unknown cache and bad options.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: str = "paged_int4",
        *,
        system: str | None = None,
        store: PrefixStore | None = None,
        **options: Any,
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise CacheOptionError(
                f"tokenizer must have a chat template, and {type(tokenizer).__name__} has none; set tokenizer.chat_template, "
                "or call model.generate() with text of your own"
            )
        given = {"on_edit": "crop", **options}
        if store is not None:
            given["prefix_store"] = store
        self.model, self.tokenizer = model, tokenizer
        self.cache: PagedCache = PagedCache.from_implementation(model.config, cache, given)
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def __call__(self, text: str, max_new_tokens: int = NEW_TOKENS, **arguments: Any) -> str:
        """Say `text` and return the answer.

        Args:
            max_new_tokens: of the answer, at most; arguments: others of `generate`.
        Raises: what `generate` raises.
        """
        return self._turn(text, {**arguments, "max_new_tokens": max_new_tokens})

    def stream(
        self, text: str, max_new_tokens: int = NEW_TOKENS, **arguments: Any
    ) -> Iterator[str]:
        """Say `text` and yield the answer in pieces, as they are generated; who stops early ends the answer there.

        Arguments and errors are those of a call.
        """
        pieces = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stopped, failed = threading.Event(), list[BaseException]()

        def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full(ids.shape[:1], stopped.is_set(), device=ids.device)

        criteria = StoppingCriteriaList([*arguments.pop("stopping_criteria", ()), stop])
        given = {**arguments, "max_new_tokens": max_new_tokens, "stopping_criteria": criteria}

        def answer() -> None:
            try:
                self._turn(text, {**given, "streamer": pieces})
            except BaseException as error:
                failed.append(error)
            finally:
                pieces.end()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield from pieces
        finally:
            stopped.set()
            thread.join()
        if failed:
            raise failed[0]

    def _turn(self, text: str, arguments: dict[str, Any]) -> str:
        asked = [*self.messages, {"role": "user", "content": text}]
        inputs = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)
        try:
            self.cache.forward.check()
        except InterruptedForwardError:  # in the turn before
            self.cache.reset()
        found = self.model.generate(**inputs, past_key_values=self.cache, **arguments)
        new = getattr(found, "sequences", found)[0, inputs["input_ids"].shape[1] :]
        answer = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer
