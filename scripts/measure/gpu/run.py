"""Run a plan: within its time, a row at a time, and on behind whatever breaks."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_hf.evaluation.timing import Budget

from kv_hf.evaluation.rows import append_rows, commit, read_rows
from measure.gpu.crew import Worker, together
from measure.gpu.plan import Job, Part

LOG = "jobs.jsonl"
LEAST_SECONDS = 2.0  # a job is not begun for less


@dataclass
class Run:
    """One run of a plan.

    Args:
        out: folder of the rows: a file for each part, and LOG, which says how each job ended.
        seconds: for everything; what has not begun then is left out, what runs is ended.
        workers: processes beside each other where nothing is timed.
        say: told how each job ended.
    """

    out: Path
    seconds: float
    workers: int = 1
    say: Callable[[str], object] = print
    make: Callable[[], Worker] = Worker
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = Budget(self.seconds)
        self._lock = threading.Lock()

    def run(self, parts: Sequence[Part]) -> int:
        """Run all parts; return 0, or 1 where a result is wrong or a job failed."""
        finished = self._finished()
        for part in parts:
            jobs = [job for job in part.jobs if (part.name, job.name) not in finished]
            if len(jobs) < len(part.jobs):
                self.say(
                    f"{part.name}: {len(part.jobs) - len(jobs)} jobs were done by an earlier run"
                )
            begun = time.monotonic()
            together(
                jobs,
                self.workers if part.parallel else 1,
                lambda worker, job, part=part: self._job(worker, part, job),  # type: ignore[misc]
                self.make,
            )
            self.say(f"{part.name}: {time.monotonic() - begun:.0f} s")
        return int(bool(self.wrong or self.failed))

    def _job(self, worker: Worker, part: Part, job: Job) -> None:
        left = (self.budget.left or 0.0) - (1.0 - part.until) * self.seconds
        if left < LEAST_SECONDS:
            self._end(part, job, "left out", "the time was over", 0.0)
            return
        begun, rows, wrong = time.monotonic(), 0, False

        def keep(row: dict[str, Any]) -> None:
            nonlocal rows, wrong
            rows, wrong = rows + 1, wrong or not row["ok"]
            self._append(part, {"part": part.name, "kind": job.kind, **row})

        error = worker.do(job, min(job.limit, left), keep)
        if error.startswith("out of memory") and not rows:
            worker.close()  # something of the jobs before may have stayed
            left -= time.monotonic() - begun
            error = worker.do(job, min(job.limit, left), keep)
        status = "failed" if error else "wrong" if wrong else "done"
        if error:
            row = {
                "part": part.name,
                "kind": job.kind,
                "job": job.name,
                **job.settings,
                "error": error,
                "ok": False,
            }
            self._append(part, row)
        self._end(part, job, status, error, time.monotonic() - begun)

    def _append(self, part: Part, row: dict[str, Any]) -> None:
        with self._lock:
            append_rows(self.out / f"{part.name}.jsonl", [row])

    def _end(self, part: Part, job: Job, status: str, error: str, seconds: float) -> None:
        title = f"{part.name}: {job.name}"
        row = {
            "part": part.name,
            "job": job.name,
            "status": status,
            "error": error,
            "commit": commit(),
        }
        with self._lock:
            append_rows(self.out / LOG, [{**row, "seconds": round(seconds, 2)}])
            lists = {"wrong": self.wrong, "failed": self.failed, "left out": self.left_out}
            if status in lists:
                lists[status].append(title)
            self.say(f"{title}: {status} in {seconds:.1f} s" + (f": {error}" if error else ""))

    def _finished(self) -> set[tuple[str, str]]:
        """Return the jobs that an earlier run of the same code has done; those that failed are tried again."""
        return {
            (row["part"], row["job"])
            for row in read_rows(self.out / LOG)
            if row["status"] == "done" and row["commit"] == commit()
        }
