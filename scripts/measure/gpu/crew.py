"""Workers beside each other: who hands them jobs, ends those that take too long, and replaces those that died."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_hf.evaluation.child import search_path

from measure.gpu.plan import Job

MODULE = "measure.gpu.worker"


class Worker:
    """One process that measures, started at its first job."""

    def __init__(
        self, command: Sequence[str] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.command = command or [sys.executable, "-m", MODULE]
        self.env = {**os.environ, "PYTHONPATH": search_path(MODULE), **(env or {})}
        self.process: subprocess.Popen[str] | None = None

    def do(self, job: Job, seconds: float, keep: Callable[[dict[str, Any]], object]) -> str:
        """Do one job in at most so many seconds, calling `keep` with each row; return its error, "" without one."""
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(max(0.0, seconds), end)
        clock.start()
        try:
            process.stdin.write(json.dumps(job.as_dict()) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if "row" in message:
                    keep(message["row"])
                    continue
                if message["unusable"]:
                    self.close()
                return str(message["end"])
        except (BrokenPipeError, ValueError):  # it died while a line was on its way
            pass
        finally:
            clock.cancel()
        code = process.wait()
        self.process = None
        return (
            f"ended after {seconds:.0f} s"
            if late.is_set()
            else f"the process died (exit code {code})"
        )

    def _process(self) -> "subprocess.Popen[str]":
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env, text=True
            )
        return self.process

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def together(
    jobs: Sequence[Job],
    workers: int,
    do: Callable[[Worker, Job], object],
    make: Callable[[], Worker],
) -> None:
    """Call `do` with each job, in order, and a worker of its own for the time; at most `workers` at a time.

    Raises: the first exception of `do`, when all that is running has ended; nothing new begins then.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failed: list[BaseException] = []

    def drain() -> None:
        worker = make()
        try:
            while not failed:
                do(worker, waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=drain) for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C reaches this thread alone
        failed.append(error)
        raise
    if failed:
        raise failed[0]
