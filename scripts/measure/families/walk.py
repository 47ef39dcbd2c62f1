"""Examine many families, each in a process of its own with a time and a memory limit."""

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

# imported once, before the processes of the families are forked off
PRELOADED = (
    "measure.families.examine",
    "transformers.generation.candidate_generator",
    "sklearn.metrics",
)
MEMORY = 12 << 30  # bytes of address space: a family whose sizes nobody shrank ends with an error
Task = tuple[str, str]  # family, role


def context() -> Any:
    """Return where processes come from: forks of one that has imported what all of them need."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOADED))
    return found


def walk(
    tasks: Sequence[Task],
    operations: list[str] | None = None,
    *,
    seconds: float = 180,
    processes: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield one row per task as `examine` returns it; a crash and a task that takes too long give rows as well.

    Args:
        tasks: families with their roles.
        operations: as `examine` takes them.
        seconds: limit of one family.
        processes: families that are examined at a time.
    """
    processes_of = context()
    waiting = list(reversed(tasks))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(_Running(processes_of, waiting.pop(), operations, seconds))
            for one in list(running):
                row = one.row()
                if row is not None:
                    running.remove(one)
                    yield row
            time.sleep(0.02)
    finally:
        for one in running:
            one.end()


class _Running:
    """A process that examines one family."""

    def __init__(
        self, context: Any, task: Task, operations: list[str] | None, seconds: float
    ) -> None:
        self.task = task
        self.answer, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_examine, args=(theirs, *task, operations), daemon=True
        )
        self.process.start()
        theirs.close()
        self.until = time.monotonic() + seconds
        self.seconds = seconds

    def row(self) -> dict[str, Any] | None:
        """Return the row, or None while the process works on it."""
        if self.answer.poll():
            try:
                found: dict[str, Any] = self.answer.recv()
            except EOFError:
                self.process.join()
                found = self._failed(f"its process ended with exit code {self.process.exitcode}")
        elif time.monotonic() > self.until:
            found = self._failed(f"it took more than {self.seconds:g} seconds")
        else:
            return None
        self.end()
        return found

    def end(self) -> None:
        """End the process, if it still runs."""
        self.process.kill()
        self.process.join()
        self.answer.close()

    def _failed(self, message: str) -> dict[str, Any]:
        family, role = self.task
        return {
            "family": family,
            "role": role,
            "verdict": "ERROR",
            "message": message,
            "operations": {},
        }


def _examine(answer: Connection, family: str, role: str, operations: list[str] | None) -> None:
    """Be the process of one family."""
    import resource

    import torch
    import transformers

    from measure.families.examine import examine

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer.send(examine(family, role, operations))
    answer.close()
