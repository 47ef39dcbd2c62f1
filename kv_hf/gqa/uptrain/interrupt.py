"""Ctrl-C and SIGTERM as a wish to stop: the step at hand is finished and the state saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Wish:
    """A request to stop the run."""

    asked = False


@contextmanager
def stop_wishes() -> Iterator[Wish]:
    """Catch the first SIGINT or SIGTERM as a wish; the second one has its usual effect.

    Handlers can be set in the main thread only; elsewhere the wish stays unasked.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        wish.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
