"""Ctrl-C and SIGTERM as a request to stop: the step at hand is finished and the state saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """A request to stop the run."""

    asked = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch the first SIGINT or SIGTERM as a request; the second one has its usual effect.

    Handlers can be set in the main thread only; elsewhere the request stays unasked.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
