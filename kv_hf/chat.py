"""A conversation: messages in, text out, over one cache that keeps what a turn has in common with the turns before it."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteriaList, TextIteratorStreamer

from .cache.model_shape import CACHE, is_encoder_decoder
from .cache.paged_cache import PagedCache
from .cache.prefix_store import PrefixStore
from .errors import CacheOptionError, InterruptedForwardError, KVCacheError

NEW_TOKENS = 512
# arguments of generate() that a conversation gives itself
OWN = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values", "cache", "use_cache", "cache_implementation", "cache_config")  # fmt: skip


class Chat:
    """A conversation with a model.

        chat = kv_hf.Chat(model, tokenizer, cache="paged_int4", system="Answer in one sentence.")
        print(chat("Name a river in France."))
        for piece in chat.stream("And where does it end?"):
            print(piece, end="", flush=True)
        print(chat.cache)

    Each turn passes the whole text, of which only the tokens that the cache does not hold yet are computed. Where the
    template writes earlier turns otherwise than they were generated (reasoning is left out, say), or `messages` was
    changed, the common beginning is kept. A turn that fails, or is interrupted, leaves `messages` as they were. A deep copy
    has messages and a cache of its own, and the same model.

    Args:
        model: a causal language model in eval mode; one conversation computes at a time.
        tokenizer: its tokenizer, with a chat template.
        cache: name of a cache, see docs/options.md.
        system: text of a system message; None: none.
        store: keeps the pages of beginnings that several conversations share, a long system message say.
        options: of the cache, as in `cache_config`; `on_edit` is "crop".
    Attributes:
        messages: dicts of "role" and "content", as chat templates take them. They may be changed between turns.
        cache: holds the tokens of the last turn.
    Raises: CacheOptionError for the name of a model, an encoder-decoder, a tokenizer without a template, an unknown cache and bad options.
    """

    _running = False  # a turn computes now

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
        if isinstance(model, str):
            raise CacheOptionError(
                f"model must be a loaded model, got {model!r}; load it with AutoModelForCausalLM.from_pretrained"
            )
        if getattr(tokenizer, "chat_template", None) is None:
            raise CacheOptionError(
                f"tokenizer must have a chat template, and {type(tokenizer).__name__} has none; set tokenizer.chat_template, "
                "or call model.generate() with text of your own"
            )
        if is_encoder_decoder(model.config):
            raise CacheOptionError(
                f"a Chat needs a decoder, and {type(model).__name__} is an encoder-decoder"
            )
        given = {"on_edit": "crop", **options}
        if store is not None:
            given["prefix_store"] = store
        self.model, self.tokenizer = model, tokenizer
        self.cache: PagedCache = PagedCache.from_implementation(model.config, cache, given)
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chat":
        made = copy.copy(self)
        made.cache, made.messages = copy.deepcopy((self.cache, self.messages), memo)
        made._running = False
        return made

    def __call__(self, text: str, **arguments: Any) -> str:
        """Say `text` and return the answer.

        Args:
            arguments: of `generate`; without max_new_tokens or a generation_config an answer has at most 512 tokens.
        Raises: KVCacheError while another turn computes, CacheOptionError for arguments that the Chat gives itself, and what
            `generate` raises.
        """
        return self._turn(text, arguments)

    def stream(self, text: str, **arguments: Any) -> Iterator[str]:
        """Say `text` and yield the answer in pieces, as they are generated; who leaves the loop ends the answer there.

        A stream that is neither read to its end nor closed still computes. Arguments and errors are those of a call.
        """
        if "streamer" in arguments:
            raise CacheOptionError(
                "a stream brings a streamer of its own; leave streamer out, or call the Chat"
            )
        pieces = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stopped, failed = threading.Event(), list[BaseException]()

        def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full(ids.shape[:1], stopped.is_set(), device=ids.device)

        asked = arguments.pop("stopping_criteria", None) or ()
        criteria = StoppingCriteriaList([*([asked] if callable(asked) else asked), stop])
        given = {**arguments, "stopping_criteria": criteria, "streamer": pieces}
        before, stands = self.messages, False

        device = self.model.device.type
        cast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def answer() -> None:
            try:
                with torch.autocast(device, *cast):  # of the caller's thread
                    self._turn(text, given)
            except BaseException as error:
                failed.append(error)
            finally:
                pieces.end()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield from pieces
            stands = True
        except GeneratorExit:
            stands = True
            raise
        finally:
            stopped.set()
            thread.join()
            if not stands:  # Ctrl-C while it was read
                self.messages = before
        if failed:
            raise failed[0]

    def _turn(self, text: str, arguments: dict[str, Any]) -> str:
        for name in OWN:
            if name in arguments:
                raise CacheOptionError(
                    f"{name} is given by the Chat itself: cache and options when it is made, the text by its messages; leave it out"
                )
        if self._running:
            raise KVCacheError(
                "another turn of this Chat still computes: read its stream to the end, or call the stream's close()"
            )
        self._running = True
        try:
            return self._answer(text, arguments)
        finally:
            self._running = False

    def _answer(self, text: str, arguments: dict[str, Any]) -> str:
        if arguments.get("generation_config") is None:
            arguments = {"max_new_tokens": NEW_TOKENS, **arguments}
        # whatever the model's own generation_config says
        arguments |= {
            CACHE: self.cache,
            "cache_implementation": None,
            "use_cache": True,
        }
        asked = [*self.messages, {"role": "user", "content": text}]
        inputs = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)
        try:
            self.cache.forward.check()
        except InterruptedForwardError:  # in the turn before
            self.cache.reset()
        found = self.model.generate(**inputs, **arguments)
        new = getattr(found, "sequences", found)[0, inputs["input_ids"].shape[1] :]
        answer = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer
