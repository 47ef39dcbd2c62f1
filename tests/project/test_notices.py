"""Notices follow transformers' verbosity, and wait while a text is streamed."""

import contextlib
import io
import logging
import threading
import warnings

import pytest
from tiny_models import make_model, tokens
from tiny_tokenizer import make_tokenizer
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

import kv_hf
from kv_hf import notices


@pytest.fixture
def verbosity():
    """Let notices follow transformers alone, as they do outside of tests."""
    before = transformers_logging.get_verbosity()
    notices.logger.setLevel(logging.NOTSET)
    yield transformers_logging.set_verbosity
    transformers_logging.set_verbosity(before)
    notices.logger.setLevel(logging.WARNING)


def said(caplog, *keys):
    """What is said for these keys: log lines and warnings."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for key in keys:
            notices.say_once(f"line {key}", f"line {key}")
            notices.warn_once(f"warning {key}", f"warning {key}")
    return [*caplog.messages, *(str(one.message) for one in found)]


def test_notices_follow_the_verbosity_of_transformers(verbosity, caplog):
    verbosity(logging.ERROR)
    assert said(caplog, "a") == []
    verbosity(logging.WARNING)
    assert said(caplog, "a", "a") == ["line a", "warning a"]  # what was not heard was not said


@pytest.mark.parametrize("name", ["kv_hf", "transformers.kv_hf"])
def test_notices_stop_where_their_own_logger_is_turned_down(caplog, name):
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        assert said(caplog, "a") == []
    finally:
        logger.setLevel(before)


def test_log_lines_take_the_handlers_of_transformers():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    transformers_logging.add_handler(handler)
    try:
        notices.say_once("a", "a line")
    finally:
        transformers_logging.remove_handler(handler)
    assert stream.getvalue() == "a line\n"


def test_held_back_says_all_at_its_end_and_names_the_place(caplog):
    def slow_path():
        notices.warn_once("warning", "a warning")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with contextlib.suppress(KeyError), notices.held_back():
            slow_path()
            notices.say_once("line", "a line")
            assert not found and not caplog.messages
            raise KeyError
    assert [str(one.message) for one in found] == ["a warning"]
    assert found[0].filename == __file__
    assert caplog.messages == ["a line"]


def test_held_back_holds_its_own_thread_alone(caplog):
    with notices.held_back():
        other = threading.Thread(target=notices.say_once, args=("other", "other"))
        other.start()
        other.join()
        assert caplog.messages == ["other"]


class Terminal(TextStreamer):
    """A streamer that writes to the same list as notices do."""

    def __init__(self, shown):
        super().__init__(make_tokenizer())
        self.shown = shown

    def on_finalized_text(self, text, stream_end=False):
        self.shown.append("end" if stream_end else "text")


@pytest.mark.parametrize("positional", [False, True])
def test_generate_says_nothing_while_it_streams(positional):
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append("notice")
    notices.logger.addHandler(handler)
    model = make_model("llama")
    model.set_attn_implementation("sdpa")
    streamer = Terminal(shown)
    given = ([None] * 6 + [streamer]) if positional else []
    named = {} if positional else {"streamer": streamer}
    try:
        model.generate(
            tokens(1, 9), *given, **named, max_new_tokens=5, cache_implementation="paged_int4"
        )
    finally:
        notices.logger.removeHandler(handler)
    assert shown.count("notice") == 1 and "text" in shown
    assert shown[-2:] == ["end", "notice"]


def test_a_silenced_block_remembers_nothing(caplog):
    with notices.silenced():
        assert said(caplog, "a") == []
    assert said(caplog, "a") == ["line a", "warning a"]
    assert isinstance(kv_hf.KVCacheWarning("a"), UserWarning)
