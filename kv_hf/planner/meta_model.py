"""Build a model without weights, and run it for a few tokens, without anything else in the process noticing."""

import copy
import inspect
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import DynamicCache

from ..cache.compat import is_dummy
from ..errors import UnsupportedModelError
from .tracing import Reads, follow_layer, reading

ROWS, TOKENS = 2, 3
MOST_MODULES = 250_000  # of a model; 61 layers of 384 experts have 71,000

# in this order: what people load to generate text with
_KINDS = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
)
# one probe at a time: Python's warning filters, and torch's default dtype while a model is built, are the process's
_alone = threading.RLock()


class _ThisThread(logging.Filter):
    """Drops the records of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread


@contextmanager
def quiet() -> Iterator[None]:
    """Run alone, and keep what transformers says about slow paths from the user: nothing is computed here."""
    with _alone, _without_records(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_records() -> Iterator[None]:
    drop = _ThisThread()
    loggers = (transformers.logging.get_logger("transformers"), logging.getLogger())
    handlers = [handler for logger in loggers for handler in logger.handlers]
    for handler in handlers:
        handler.addFilter(drop)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(drop)


def model_kind(config: Any) -> Any:
    """Return the auto class that builds a model which generates text from `config`, None where none does."""
    for name in _KINDS:
        kind = getattr(transformers, name, None)
        if kind is not None and type(config) in kind._model_mapping:
            return kind
    return None


def build(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """Build the model of a copy of `config` on the meta device: shapes and dtypes, no numbers. Call it in `quiet`."""
    own = copy.deepcopy(config)
    with torch.device("meta"), _few_modules():
        return model_kind(own).from_config(own, attn_implementation=attention, dtype=dtype).eval()


@contextmanager
def _few_modules() -> Iterator[None]:
    """Stop a model of this thread that goes on and on: some config's number says how often a part is repeated."""
    thread, count = threading.get_ident(), 0

    def note(*_: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > MOST_MODULES:
            raise UnsupportedModelError(
                f"a model of this config has more than {MOST_MODULES:,} modules, more than a plan builds"
            )

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


def run(model: Any) -> tuple[Any, Reads]:
    """Return the cache of a forward of 2 rows of 3 tokens, and what attention read in it.

    The cache is a DynamicCache, or one of the model's own class where it takes no other.
    """
    takes = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in takes else "cache_params"
    if name not in takes:
        raise UnsupportedModelError(f"{type(model).__name__} takes no cache of transformers")
    with torch.device("meta"), torch.no_grad(), reading() as reads:
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        cache = DynamicCache(config=model.config)
        for index, layer in enumerate(cache.layers):
            if not is_dummy(layer) and hasattr(layer, "update"):
                follow_layer(layer, index)
        try:
            model(input_ids=ids, use_cache=True, **{name: cache})
        except ValueError as error:
            if "cache of its own" not in str(error):  # MiniMax
                raise
            cache = getattr(model(input_ids=ids, use_cache=True), name)
    return cache, reads
