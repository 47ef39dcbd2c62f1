"""Python threads that begin at the same moment."""

import threading
from collections.abc import Callable


def at_once(work: Callable[[int], object], count: int) -> list[object]:
    """Run work(0) .. work(count - 1), each in a thread, from the same moment on; return what each gave or raised."""
    results: list[object] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    return results
