"""Run workloads: which configurations, in which process, for how long, and where their rows go.

A workload is a function that takes a device and one configuration, and yields the fields of its rows:

    @workload("beams", grid=[{"shape": ["smollm2"], "context": [512, 2048]}], gate=equal_beams)
    def beams(device: torch.device, shape: str, context: int) -> Iterator[Fields]:
        ...

The runner does the rest. Each configuration is measured in a child process, which may take a limited time and may die: the
reason is then a row of kind "failed", and the next configuration goes on in a new child. A configuration's rows are
written together as soon as it ends. Configurations whose rows are in the file already are skipped, failed ones are not.
Knows nothing about what is measured. Needs torch and transformers alone.
"""

import argparse
import gc
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, get_context, parent_process
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kv_hf.evaluation.memory import expendable, in_words, timed
from kv_hf.evaluation.rows import append_rows, check_writable, commit, machine, make_row, read_rows
from kv_hf.text_table import table_lines

Fields = dict[str, Any]
Grid = Sequence[Mapping[str, Sequence[Any]]]  # products of the fields' values, one behind the other
Answer = list[Fields] | str  # the rows, or why there are none
Task = tuple["Workload", Fields, str, str]  # workload, configuration, device, cell

RESULTS = Path(__file__).parents[2] / "results"
FAILED = "failed"  # the kind of rows that say why a configuration has no others
WARMUP = 2  # rounds ahead of those that count
LEAST_SECONDS = 2.0  # a configuration is not begun for less
SPAWN = get_context("spawn")
WORKLOADS: dict[str, "Workload"] = {}


@dataclass(frozen=True)
class Spread:
    """Median and spread of n samples; the unit is that of the samples."""

    p50: float
    p20: float
    p80: float
    mean: float
    max: float
    n: int

    def row(self, prefix: str) -> dict[str, float]:
        """Return the fields as `prefix_p50` and so on, as rows of results/ have them."""
        return {f"{prefix}_{name}": value for name, value in asdict(self).items()}


def quantile(samples: Sequence[float], part: float) -> float:
    """Return the `part` quantile (0 to 1), linear between neighbouring samples. Raises ValueError without samples."""
    if not samples:
        raise ValueError("a quantile needs at least one sample, got none")
    return torch.tensor(samples, dtype=torch.float64).quantile(part).item()


def spread(samples: Sequence[float]) -> Spread:
    """Summarise samples."""
    middle, low, high = (quantile(samples, part) for part in (0.5, 0.2, 0.8))
    count = len(samples)
    return Spread(middle, low, high, mean=sum(samples) / count, max=max(samples), n=count)


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    *,
    warmup: int = WARMUP,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Call every contender once per round and return the milliseconds of each, warm-up rounds left out.

    Odd rounds go backwards, so that no contender always follows the same neighbour.

    Args:
        before: called with the name ahead of each call, outside of the time.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            before(name)
            took = timed(contenders[name], device)
            if number >= 0:
                times[name].append(took)
    return times


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth, in the units of `allowed`. A NaN is wrong."""

    name: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the result is right."""
        return self.error <= self.allowed


class WrongResultError(ValueError):
    """A result is wrong, so nothing of its configuration is timed."""


def check(verdicts: Iterable[Verdict]) -> None:
    """Raise WrongResultError naming every result that is wrong."""
    wrong = [
        f"{one.name}: error {one.error:.3g}, allowed {one.allowed:.3g}"
        for one in verdicts
        if not one.ok
    ]
    if wrong:
        raise WrongResultError(f"wrong results: {'; '.join(wrong)}")


@dataclass
class Contender:
    """One of several calls that are timed in turns.

    Attributes:
        run: what is timed.
        before: called ahead of each `run`, outside of the time.
        verdict: judges the result of `run`; None where nothing is left to judge.
        fields: what its row says about it.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    verdict: Callable[[], Verdict] | None = None
    fields: Fields = field(default_factory=dict)


def judge(contenders: Iterable[Contender]) -> None:
    """Judge each contender once, and note its error. Raises WrongResultError naming every one that is wrong."""
    verdicts = []
    for one in contenders:
        if one.verdict is not None:
            verdicts.append(one.verdict())
            one.fields |= {"error": verdicts[-1].error, "error_allowed": verdicts[-1].allowed}
            one.verdict = None
    check(verdicts)


def in_turns(
    contenders: Sequence[Contender],
    rounds: int,
    device: torch.device,
    *,
    label: str = "contender",
    ms: str = "ms",
    scale: float = 1.0,
) -> list[Fields]:
    """Judge all contenders, then call each once per round, every second round backwards; return a row of each.

    Rows have the milliseconds, times `scale`: median and spread as `ms`_p50 and so on, the least, and the least of the
    calling thread's processor, to which other programs do not add. Ratios say how many times as fast as the first
    contender: the median of the ratios within each round.

    Args:
        label: the rows' field for the contenders' names.
    Raises: WrongResultError before anything is timed.
    """
    judge(contenders)
    by_name = {one.name: one for one in contenders}
    thread: dict[str, list[float]] = {name: [] for name in by_name}

    def metered(name: str) -> Callable[[], None]:
        def call() -> None:
            start = time.thread_time()
            by_name[name].run()
            thread[name].append(1e3 * (time.thread_time() - start))

        return call

    def before(name: str) -> None:
        by_name[name].before()

    runs = {name: metered(name) for name in by_name}
    wall = interleave(runs, rounds, device, warmup=WARMUP, before=before)
    first = contenders[0].name
    return [
        {
            label: name,
            **one.fields,
            **spread([scale * sample for sample in wall[name]]).row(ms),
            f"{ms}_min": scale * min(wall[name]),
            f"thread_{ms}_min": scale * min(thread[name][WARMUP:]),
            f"ratio_to_{first}": quantile(list(map(truediv, wall[first], wall[name])), 0.5),
        }
        for name, one in by_name.items()
    ]


def of_this_state(config: Fields) -> object:
    """Return what decides a time beside the configuration: the code, the machine and the threads."""
    return commit(), machine(), torch.get_num_threads()


@dataclass(frozen=True)
class Workload:
    """A function that measures, and how `bench.py NAME` runs it.

    Attributes:
        measure: gets a torch.device and a configuration's fields as keywords, and yields the fields of its rows.
        grid: its configurations.
        kind, file: of its rows, where they are not `name`; the file is results/FILE.jsonl.
        columns: the fields that its table shows beside those of the grid, with blanks between them.
        gate: gets what `measure` gets, and judges before that is called.
        state: what else decides the figures, as JSON. Rows of another state are not taken for finished. Of measurements
            of quality it is the model's revision, say.
        limit: seconds for a configuration.
        until: part of the whole time after which no configuration begins.
        timed: False lets several configurations be measured at once, in children or in processes of `accelerate launch`.
        device: type of the device that the grid is meant for; "" for any.
    """

    name: str
    measure: Callable[..., Iterable[Fields]]
    grid: Grid
    kind: str = ""
    file: str = ""
    columns: str = ""
    gate: Callable[..., Iterable[Verdict]] | None = None
    state: Callable[[Fields], object] = of_this_state
    limit: float = math.inf
    until: float = 1.0
    timed: bool = True
    device: str = ""

    def configurations(self, only: Mapping[str, Sequence[Any]]) -> list[Fields]:
        """Return the configurations of the grid that have the values `only`, in the grid's order.

        A value that no part of the grid has is measured in all of them, so that other sizes can be asked for.

        Raises: ValueError for a field that the grid lacks.
        """
        known: dict[str, list[Any]] = {}
        for name, own in itertools.chain.from_iterable(part.items() for part in self.grid):
            known.setdefault(name, []).extend(own)
        unknown = sorted(set(only) - set(known))
        if unknown:
            raise ValueError(
                f"--only must name a field of {self.name}, got {unknown[0]!r}; it has {', '.join(known)}"
            )
        found: list[Fields] = []
        for part in self.grid:
            if set(only) <= set(part):
                values = [
                    [v for v in only.get(name, own) if v in own or v not in known[name]]
                    for name, own in part.items()
                ]
                found += [dict(zip(part, one, strict=True)) for one in itertools.product(*values)]
        return [config for place, config in enumerate(found) if config not in found[:place]]

    def cell(self, config: Fields, device: str) -> str:
        """Return what the rows of a configuration are found by: 16 hex digits."""
        known = [self.name, config, torch.device(device).type, self.state(config)]
        text = json.dumps(known, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


Measure = Callable[..., Iterable[Fields]]


def workload(name: str, grid: Grid, **options: Any) -> Callable[[Measure], Measure]:
    """Register the function of a module as a Workload with these options; the function stays as it is.

    `bench.py NAME` runs it, and `bench.py PART` all workloads whose names begin with "PART/".
    """

    def register(measure: Measure) -> Measure:
        if name in WORKLOADS:
            raise ValueError(f"two workloads are called {name!r}")
        WORKLOADS[name] = Workload(name, measure, grid, **options)
        return measure

    return register


def measured(task: Task) -> Answer:
    """Measure one configuration in this process; return its rows, or why there are none, in words."""
    work, config, device, cell = task
    place = torch.device(device)
    made = {"kind": work.kind or work.name, "device": place.type, **config}
    try:
        with torch.no_grad():
            if work.gate is not None:
                check(work.gate(place, **config))
            found = list(work.measure(place, **config))
        rows = [make_row(**{**made, **fields, "cell": cell}) for fields in found]
        if not rows:
            raise ValueError("nothing was measured")
        json.dumps(rows, allow_nan=False)
        return rows
    except Exception as error:  # whatever a kernel, a compiler, a driver or a library raises
        return in_words(error) or type(error).__name__
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # the GPU answers no longer; the reason is told already
                torch.cuda.empty_cache()


def _child(pipe: "connection.Connection[Any, Any]") -> None:
    os.setsid()  # Ctrl-C is for the parent, and what this process starts ends with it
    expendable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task, threads = pipe.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        pipe.send(None)
        pipe.send(measured(task))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


class Budget:
    """Seconds for everything, from now on; None: no end."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.begun = time.monotonic()

    def left(self, part: float = 1.0) -> float:
        """Return the seconds that are left of the first `part` of all."""
        return part * self.seconds - (time.monotonic() - self.begun)


class Child:
    """A process that measures one configuration after another."""

    def __init__(self) -> None:
        self.pipe, far = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_child, args=(far,))
        self.process.start()
        far.close()

    def give(self, task: Task, threads: int, left: float) -> None:
        """Have a task done within its limit, which begins when the child does, and within what is left of the whole time."""
        self.task, self.begun = task, time.monotonic()
        self.last = self.end = self.begun + left
        self.pipe.send((task, threads))

    def answer(self) -> Answer | None:
        """Return the rows or the reason; None where it is still measuring."""
        if not self.pipe.poll():
            now = time.monotonic()
            return f"ended after {now - self.begun:.0f} s" if now >= self.end else None
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process died (exit code {self.process.exitcode})"
        if found is None:
            self.begun = time.monotonic()
            self.end = min(self.last, self.begun + self.task[0].limit)
        return found

    def close(self) -> None:
        """End the process and what it started."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it has not begun yet, or is gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def in_children(
    tasks: Iterable[Task], workers: int, budget: Budget, idle: list[Child]
) -> Iterator[tuple[Task, Answer | None]]:
    """Yield each task with its rows, the reason that there are none, or None where the time was over.

    Children in `idle` are taken first and left there in the end; one that failed is replaced.
    """
    waiting, busy = list(tasks), list[Child]()
    threads = max(1, torch.get_num_threads() // workers)
    while len(idle) > workers:
        idle.pop().close()
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                task = waiting.pop(0)
                left = budget.left(task[0].until)
                if left < LEAST_SECONDS:
                    yield task, None
                    continue
                busy.append(idle.pop() if idle else Child())
                busy[-1].give(task, threads, left)
            if not busy:
                continue
            first = min(child.end for child in busy) - time.monotonic()
            pipes = [child.pipe for child in busy]
            connection.wait(pipes, None if first == math.inf else max(0.0, first))
            for child in tuple(busy):
                found = child.answer()
                if found is None:
                    continue
                busy.remove(child)
                if isinstance(found, list):
                    idle.append(child)
                else:
                    child.close()
                yield child.task, found
    finally:
        for child in busy:
            child.close()


@dataclass
class Outcome:
    """What became of the configurations: new rows, and in words those that failed or were left out."""

    rows: list[Fields] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run(
    work: Workload,
    configurations: Sequence[Fields],
    *,
    device: str = "cpu",
    out: Path | None = None,
    workers: int = 1,
    budget: Budget | None = None,
    isolated: bool = True,
    idle: list[Child] | None = None,
    processes: Any = None,
    say: Callable[[str], object] = tqdm.write,
) -> Outcome:
    """Measure the configurations that have no rows in `out` yet, and append each one's rows as soon as it ends.

    Args:
        out: a JSONL file; None keeps nothing.
        workers: configurations at a time, of a workload that is not timed.
        isolated: False measures in this process, without limits.
        idle: children to begin with, which are the caller's to close.
        processes: accelerate's PartialState. Each process takes a part of the configurations; timed ones are all the
            main process's, while the others wait.
    Returns: for all processes what failed or was left out, for each its own rows.
    Raises: OSError where rows cannot be written, because going on would measure for nothing.
    """
    outcome, budget = Outcome(), budget or Budget()
    cells = [(config, work.cell(config, device)) for config in configurations]
    rows = [] if out is None else read_rows(out)
    finished = {row.get("cell") for row in rows if row.get("kind") != FAILED}
    todo = [(work, config, device, cell) for config, cell in cells if cell not in finished]
    if len(todo) < len(cells):
        say(f"{work.name}: {len(cells) - len(todo)} of {len(cells)} are finished already")
    if processes is not None:
        processes.wait_for_everyone()  # all have read the file before the first of them writes
        others = todo[processes.process_index :: processes.num_processes]
        todo = others if not work.timed else todo if processes.is_main_process else []
    many = 1 if work.timed else max(1, min(workers, os.cpu_count() or 1))
    children: list[Child] = [] if idle is None else idle
    alone: Iterable[tuple[Task, Answer | None]] = ((task, measured(task)) for task in todo)
    answers = in_children(todo, many, budget, children) if isolated else alone
    try:
        for task, found in tqdm(answers, work.name, len(todo), disable=None):
            config = task[1]
            title = " ".join([work.name, *(f"{name}={value}" for name, value in config.items())])
            if found is None:
                outcome.left_out.append(title)
            elif isinstance(found, str):
                outcome.failed.append(f"{title}: {found}")
                say(f"no rows for {outcome.failed[-1]}")
                facts = {"device": torch.device(device).type, "workload": work.name, **config}
                found = [make_row(**{**facts, "kind": FAILED, "failed": found})]
            else:
                outcome.rows += found
            if out is not None and found is not None:
                append_rows(out, found)
    finally:
        for child in children if idle is None else ():
            child.close()
    if processes is not None and processes.num_processes > 1:
        from accelerate.utils import gather_object

        outcome.failed = gather_object(outcome.failed)
        outcome.left_out = gather_object(outcome.left_out)
    return outcome


def table(rows: Sequence[Fields], columns: Sequence[str]) -> str:
    """Return rows as a table: what they have in common in front, then the columns that any of them has."""
    values = {name: [_cell(name, row.get(name)) for row in rows] for name in columns}
    used = {name: cells for name, cells in values.items() if any(cells)}
    same = [f"{name}={cells[0]}" for name, cells in used.items() if len(set(cells)) == 1]
    shown = [(name, cells) for name, cells in used.items() if len(set(cells)) > 1]
    return "\n".join([", ".join(same), *(table_lines(shown) if shown else [])])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("bytes"):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parsed(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each field of some "FIELD=VALUE"; a value is JSON, or a word."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--only must be FIELD=VALUE, got {text!r}")
        try:
            found.setdefault(name, []).append(json.loads(value))
        except ValueError:
            found[name].append(value)
    return found


def chosen(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names, and those below a name. Raises ValueError for one that there is not."""
    found = []
    for name in names:
        own = [one for one in WORKLOADS.values() if f"{one.name}/".startswith(f"{name}/")]
        if not own:
            raise ValueError(f"WORKLOAD must be one of {', '.join(WORKLOADS)}, got {name!r}")
        found += own
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure workloads; 0 when all gave rows, 1 when something failed, 2 for bad arguments, 130 when it was stopped."""
    parser = argparse.ArgumentParser(description="Measure workloads, each beside its peers.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="see --list")
    parser.add_argument("--list", action="store_true", help="list workloads and their fields")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help="append rows to files of results/")
    parser.add_argument("--out", type=Path, help="append rows to files of this folder")
    parser.add_argument("--budget-s", type=float, help="seconds for everything")
    parser.add_argument("--only", nargs="+", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--workers", type=int, default=1, help="processes where nothing is timed")
    args = parser.parse_args(argv)
    if args.list or not args.workloads:
        for work in WORKLOADS.values():
            print(f"{work.name}: {str(work.measure.__doc__).splitlines()[0]}")
            print("".join(f"    {json.dumps(part)}\n" for part in work.grid), end="")
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device} needs a CUDA GPU, and torch sees none here")
    folder = args.out or (RESULTS if args.record else None)
    budget, whole, idle = Budget(args.budget_s), Outcome(), list[Child]()
    try:
        only = parsed(args.only)
        for work in chosen(args.workloads):
            out = None if folder is None else folder / f"{work.file or work.name}.jsonl"
            if out is not None:
                check_writable(out)
            if work.device not in ("", args.device):
                raise ValueError(f"{work.name} needs --device {work.device}, got {args.device!r}")
            configurations = work.configurations(only)
            of = {"device": args.device, "out": out, "workers": args.workers, "budget": budget}
            found = run(work, configurations, idle=idle, **of)
            whole.failed += found.failed
            whole.left_out += found.left_out
            if found.rows:
                fields = dict.fromkeys(name for config in configurations for name in config)
                print(table(found.rows, [*fields, *work.columns.split()]), end="\n\n", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on behind the rows that are written", file=sys.stderr)
        return 130
    except ValueError as error:
        parser.error(str(error))
    finally:
        for child in idle:
            child.close()
    for title, names in (("left out", whole.left_out), ("failed", whole.failed)):
        print(f"{title}: {len(names)}" + "".join(f"\n  {name}" for name in names))
    return int(bool(whole.failed))
