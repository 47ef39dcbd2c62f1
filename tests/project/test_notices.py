"""Notices follow transformers' verbosity, and wait while a text is streamed."""

import contextlib
import logging
import threading
import warnings

import pytest
import transformers
from tiny_models import tokens
from tiny_tokenizer import make_tokenizer
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

from kv_hf import notices


def said(caplog, key):
    """What is said for this key: a log line and a warning."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        notices.say_once(f"line {key}", f"line {key}")
        notices.warn_once(f"warning {key}", f"warning {key}")
    return [*caplog.messages, *(str(one.message) for one in found)]


def test_notices_follow_the_verbosity_of_transformers(monkeypatch, caplog):
    before = transformers_logging.get_verbosity()
    monkeypatch.setattr(notices.logger, "level", logging.NOTSET)
    try:
        transformers_logging.set_verbosity(logging.ERROR)
        assert said(caplog, "a") == []
        transformers_logging.set_verbosity(logging.WARNING)
        assert said(caplog, "a") == ["line a", "warning a"]  # what was not heard was not said
        assert said(caplog, "a") == []
    finally:
        transformers_logging.set_verbosity(before)


def test_notices_stop_where_they_are_turned_down_or_silenced(caplog):
    logger = logging.getLogger("kv_hf")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        assert said(caplog, "a") == []
    finally:
        logger.setLevel(before)
    with notices.silenced():
        assert said(caplog, "a") == []
    assert said(caplog, "a") == ["line a", "warning a"]


def test_held_back_says_all_at_its_end_and_names_the_place(caplog):
    def slow_path():
        notices.warn_once("warning", "a warning")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with contextlib.suppress(KeyError), notices.held_back():
            slow_path()
            notices.say_once("line", "a line")
            other = threading.Thread(target=notices.say_once, args=("other", "other"))
            other.start()
            other.join()
            assert not found and caplog.messages == ["other"]  # its own thread alone waits
            raise KeyError
    assert [(str(one.message), one.filename) for one in found] == [("a warning", __file__)]
    assert caplog.messages == ["other", "a line"]


class Terminal(TextStreamer):
    """A streamer that writes to the same list as notices do."""

    def __init__(self, shown):
        super().__init__(make_tokenizer())
        self.shown = shown

    def on_finalized_text(self, text, stream_end=False):
        self.shown.append("end" if stream_end else "text")


@pytest.mark.parametrize("positional", [False, True])
def test_generate_says_nothing_while_it_streams(positional, monkeypatch):
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append("notice")
    monkeypatch.setattr(notices.logger, "handlers", [*notices.logger.handlers, handler])
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma2Config(**sizes, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)  # which is switched to "kv_hf"
    given = ([None] * 6 + [Terminal(shown)]) if positional else []
    options = {} if positional else {"streamer": Terminal(shown)}
    options |= {"max_new_tokens": 5, "cache_implementation": "paged_int4"}
    model.generate(tokens(1, 9), *given, **options)
    assert shown.count("notice") == 1 and "text" in shown
    assert shown[-2:] == ["end", "notice"]
