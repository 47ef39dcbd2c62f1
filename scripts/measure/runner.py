"""Run workloads: which configurations, in which process, for how long, and where their rows go.

A workload is a function that takes a device and one configuration, and yields the fields of its rows:

    @workload("prefix", grid=[{"model": "smollm2-135m", "batch": [1, 64]}], gate=same_tokens)
    def prefix(device: Device, model: str, batch: int) -> Iterator[Fields]:
        ...

The runner does the rest. Each configuration is measured in a child process, which may take a limited time and may die: the
reason is then a row of kind "failed", and the next configuration goes on in a new child. A configuration's rows are
written together as soon as it ends. Configurations whose rows are in the file already are skipped, failed ones are not.
Of several processes that `accelerate launch` or torchrun started, each takes every n-th configuration.
Knows nothing about what is measured. Needs torch and transformers alone.
"""

import argparse
import gc
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kv_hf.evaluation.memory import in_words
from kv_hf.evaluation.rows import append_rows, check_writable, commit, machine, make_row, read_rows
from kv_hf.text_table import table_lines

Device = torch.device
Call = Callable[[], object]
Fields = dict[str, Any]
# products of the fields' values, one behind the other; what is no list is the only value of its field
Grid = Sequence[Fields]
Answer = list[Fields] | str  # the rows, or why there are none
Task = tuple["Workload", Fields, str, str]  # workload, configuration, device, cell
Measure = Callable[..., Iterable[Fields]]

RESULTS = Path(__file__).parents[2] / "results"
FAILED = "failed"  # the kind of rows that say why a configuration has no others
WARMUP = 2  # rounds ahead of those that count
LEAST_SECONDS = 2.0  # a configuration is not begun for less
FOREVER = 1e7  # seconds: four months
SPAWN = get_context("spawn")
WORKLOADS: dict[str, "Workload"] = {}


# -- right, and how fast


def timed(run: Call, device: Device) -> float:
    """Return the milliseconds of one call: wall time on a CPU, CUDA events on a GPU.

    The events lie in the stream before and behind the call, so that the time holds the launches that the GPU
    had to wait for, as a user's decode step does.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def spread(samples: Sequence[float], name: str) -> Fields:
    """Return median and spread of samples, in their unit, as fields `name`_p50 and so on."""
    known = torch.tensor(samples, dtype=torch.float64)
    return {
        f"{name}_p50": known.quantile(0.5).item(),
        f"{name}_p20": known.quantile(0.2).item(),
        f"{name}_p80": known.quantile(0.8).item(),
        f"{name}_mean": known.mean().item(),
        f"{name}_max": known.max().item(),
        f"{name}_min": known.min().item(),
        f"{name}_n": len(samples),
    }


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

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, allowed {self.allowed:.3g}"


def equal(name: str, found: torch.Tensor, right: torch.Tensor) -> Verdict:
    """Judge a result that has to be the right one to the last bit."""
    return Verdict(name, float(not torch.equal(found, right)), 0.0)


class WrongResultError(ValueError):
    """A result is wrong, so nothing of its configuration is timed."""


def check(verdicts: Iterable[Verdict]) -> None:
    """Raise WrongResultError naming every result that is wrong."""
    wrong = [str(one) for one in verdicts if not one.ok]
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
    run: Call
    before: Call = lambda: None
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
    device: Device,
    *,
    label: str = "contender",
    ms: str = "ms",
    scale: float = 1.0,
) -> list[Fields]:
    """Judge all contenders, then call each once per round; return a row of each.

    What disturbs a round disturbs all of them. Odd rounds go backwards, so that no contender always follows the same one.
    Rows have the milliseconds, times `scale`: median and spread as `ms`_p50 and so on, and the least of the calling
    thread's processor, to which other programs do not add. Ratios say how many times as fast as the first contender: the
    median of the ratios within each round.

    Args:
        label: the rows' field for the contenders' names.
    Raises: WrongResultError before anything is timed.
    """
    judge(contenders)
    wall: list[list[float]] = [[] for _ in contenders]
    thread: list[list[float]] = [[] for _ in contenders]
    order = range(len(contenders))
    for number in range(-WARMUP, rounds):
        for place in order if number % 2 == 0 else reversed(order):
            contenders[place].before()
            start = time.thread_time()
            took = timed(contenders[place].run, device)
            if number >= 0:
                wall[place].append(scale * took)
                thread[place].append(1e3 * scale * (time.thread_time() - start))
    times = torch.tensor(wall, dtype=torch.float64)
    ratios = times[:1] / times
    return [
        {
            label: one.name,
            **one.fields,
            **spread(wall[place], ms),
            f"thread_{ms}_min": min(thread[place]),
            f"ratio_to_{contenders[0].name}": ratios[place].quantile(0.5).item(),
        }
        for place, one in enumerate(contenders)
    ]


# -- workloads


def listed(values: Any) -> list[Any]:
    """Return the values of a field of a grid."""
    return values if isinstance(values, list) else [values]


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
        timed: False lets several configurations be measured at once, in children of their own.
        device: type of the device that the grid is meant for; "" for any.
    """

    name: str
    measure: Measure
    grid: Grid
    kind: str = ""
    file: str = ""
    columns: str = ""
    gate: Callable[..., Iterable[Verdict]] | None = None
    state: Callable[[Fields], object] = of_this_state
    limit: float = FOREVER
    until: float = 1.0
    timed: bool = True
    device: str = ""

    def values(self) -> dict[str, list[Any]]:
        """Return the values of each field, of all parts of the grid."""
        found: dict[str, list[Any]] = {}
        for part in self.grid:
            for name, own in part.items():
                known = found.setdefault(name, [])
                known += [value for value in listed(own) if value not in known]
        return found

    def configurations(self, only: Mapping[str, Sequence[Any]]) -> list[Fields]:
        """Return the configurations of the grid that have the values `only`, in the grid's order.

        A value that no part of the grid has is measured in all of them, so that other sizes can be asked for.

        Raises: ValueError for a field that the grid lacks.
        """
        known = self.values()
        unknown = sorted(set(only) - set(known))
        if unknown:
            raise ValueError(
                f"--only must name a field of {self.name}, got {unknown[0]!r}; it has {', '.join(known)}"
            )
        found: list[Fields] = []
        for part in self.grid:
            if set(only) <= set(part):
                values = []
                for name, given in part.items():
                    own = listed(given)
                    asked = only.get(name, own)
                    values.append([v for v in asked if v in own or v not in known[name]])
                found += [dict(zip(part, one, strict=True)) for one in itertools.product(*values)]
        return [config for place, config in enumerate(found) if config not in found[:place]]

    def cell(self, config: Fields, device: str) -> str:
        """Return what the rows of a configuration are found by: 16 hex digits."""
        known = [self.name, config, torch.device(device).type, self.state(config)]
        text = json.dumps(known, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def title(self, config: Fields) -> str:
        """Return a configuration for people."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in config.items())])


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


def chosen(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names, and those below a name. Raises ValueError for one that there is not."""
    found = []
    for name in names:
        own = [one for one in WORKLOADS.values() if f"{one.name}/".startswith(f"{name}/")]
        if not own:
            raise ValueError(f"WORKLOAD must be one of {', '.join(WORKLOADS)}, got {name!r}")
        found += own
    return found


# -- processes


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
        rows = [make_row(**made | fields | {"cell": cell}) for fields in found]
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


def measure_until_closed(pipe: "connection.Connection[Any, Any]") -> None:
    """Be a child: measure what comes through the pipe. The system ends the process when a configuration takes too long."""
    os.setsid()  # Ctrl-C is for the parent, and what this process starts ends with it
    while True:
        try:
            task, threads, end = pipe.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        left = min(task[0].limit, end - time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))
        answer = measured(task)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(answer)


class Child:
    """A process that measures one configuration after another."""

    def __init__(self) -> None:
        self.pipe, far = SPAWN.Pipe()
        self.process = SPAWN.Process(target=measure_until_closed, args=(far,))
        self.process.start()
        far.close()

    def answer(self) -> Answer:
        """Return the rows, or the reason that there are none; wait for it."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
        code = self.process.exitcode
        late = code == -signal.SIGALRM
        return "its time was over" if late else f"its process died (exit code {code})"

    def close(self) -> None:
        """End the process and what it started."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it has not begun yet, or is gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Budget:
    """Seconds for everything, from now on."""

    seconds: float = FOREVER
    begun: float = field(default_factory=time.monotonic)

    def end(self, part: float) -> float:
        """Return when the first `part` of all seconds is over, by time.monotonic()."""
        return self.begun + part * self.seconds


def in_children(
    tasks: Iterable[Task], workers: int, budget: Budget, idle: list[Child]
) -> Iterator[tuple[Task, Answer | None]]:
    """Yield each task with its rows, the reason that there are none, or None where the time was over before it began.

    Children in `idle` are taken first and left there in the end; one that failed is replaced.
    """
    waiting = list(tasks)
    busy: dict[Any, tuple[Child, Task]] = {}  # by the child's pipe
    threads = max(1, torch.get_num_threads() // workers)
    while len(idle) > workers:
        idle.pop().close()
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                task = waiting.pop(0)
                end = budget.end(task[0].until)
                if end - time.monotonic() < LEAST_SECONDS:
                    yield task, None
                    continue
                child = idle.pop() if idle else Child()
                busy[child.pipe] = child, task
                child.pipe.send((task, threads, end))
            for pipe in connection.wait(busy) if busy else ():
                child, task = busy.pop(pipe)
                found = child.answer()
                if isinstance(found, list):
                    idle.append(child)
                else:
                    child.close()
                yield task, found
    finally:
        for child, _ in busy.values():
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
    say: Callable[[str], object] = tqdm.write,
) -> Outcome:
    """Measure the configurations that have no rows in `out` yet, and append each one's rows as soon as it ends.

    Args:
        out: a JSONL file; None keeps nothing.
        workers: configurations at a time, of a workload that is not timed.
        isolated: False measures in this process, without limits.
        idle: children to begin with, which are the caller's to close.
    Raises: OSError where rows cannot be written, because going on would measure for nothing.
    """
    outcome, children = Outcome(), [] if idle is None else idle
    rows = [] if out is None else read_rows(out)
    finished = {row.get("cell") for row in rows}  # failed ones have none
    tasks = [(work, config, device, work.cell(config, device)) for config in configurations]
    todo = [task for task in tasks if task[-1] not in finished]
    if len(todo) < len(tasks):
        say(f"{work.name}: {len(tasks) - len(todo)} of {len(tasks)} are finished already")
    many = 1 if work.timed else max(1, min(workers, os.cpu_count() or 1))
    alone: Iterable[tuple[Task, Answer | None]] = ((task, measured(task)) for task in todo)
    answers = in_children(todo, many, budget or Budget(), children) if isolated else alone
    try:
        for (_, config, _, _), found in tqdm(answers, work.name, len(todo), disable=None):
            if found is None:
                outcome.left_out.append(work.title(config))
                continue
            if isinstance(found, str):
                outcome.failed.append(f"{work.title(config)}: {found}")
                say(f"no rows for {outcome.failed[-1]}")
                facts = {"device": torch.device(device).type, "workload": work.name, **config}
                found = [make_row(**facts | {"kind": FAILED, "failed": found})]
            else:
                outcome.rows += found
            if out is not None:
                append_rows(out, found)
    finally:
        for child in children if idle is None else ():
            child.close()
    return outcome


# -- the command


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


def arguments() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(description="Measure workloads, each beside its peers.")
    add = parser.add_argument
    add("workloads", nargs="*", metavar="WORKLOAD", help="see --list")
    add("--list", action="store_true", help="list workloads and their fields")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--record", action="store_true", help="append rows to files of results/")
    add("--out", type=Path, help="append rows to files of this folder")
    add("--budget-s", type=float, default=FOREVER, help="seconds for everything")
    add("--only", nargs="+", default=[], metavar="FIELD=VALUE")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    add("--workers", type=int, default=1, help="processes where nothing is timed")
    return parser


def share(device: str) -> tuple[int, int, str]:
    """Return this process's number, how many `accelerate launch` or torchrun started, and its own device.

    They form no group: nobody waits for a process whose configurations take longer.
    """
    number, many = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if many > 1 and device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return number, many, device


def main(argv: Sequence[str] | None = None) -> int:
    """Measure workloads; 0 when all gave rows, 1 when something failed, 2 for bad arguments, 130 when it was stopped."""
    parser = arguments()
    args = parser.parse_args(argv)
    if args.list or not args.workloads:
        for work in WORKLOADS.values():
            print(f"{work.name}: {str(work.measure.__doc__).splitlines()[0]}")
            print("".join(f"    {json.dumps(part)}\n" for part in work.grid), end="")
        return 0
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device} needs a CUDA GPU, and torch sees none here")
    torch.set_num_threads(args.threads)
    folder = args.out or (RESULTS if args.record else None)
    number, many, device = share(args.device)
    how = {"device": device, "workers": args.workers, "budget": Budget(args.budget_s)}
    left_out: list[str] = []
    failed: list[str] = []
    idle: list[Child] = []
    try:
        only = parsed(args.only)
        for work in chosen(args.workloads):
            if work.device not in ("", torch.device(device).type):
                raise ValueError(f"{work.name} needs --device {work.device}, got {args.device!r}")
            out = None if folder is None else folder / f"{work.file or work.name}.jsonl"
            if out is not None:
                check_writable(out)
            own = work.configurations(only)[number::many]
            found = run(work, own, out=out, idle=idle, **how)
            left_out += found.left_out
            failed += found.failed
            if found.rows:
                columns = [*work.values(), *work.columns.split()]
                print(table(found.rows, columns), end="\n\n", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on behind the rows that are written", file=sys.stderr)
        return 130
    except ValueError as error:
        parser.error(str(error))
    finally:
        for child in idle:
            child.close()
    for words, titles in (("left out", left_out), ("failed", failed)):
        print(f"{words}: {len(titles)}" + "".join(f"\n  {title}" for title in titles))
    return int(bool(failed))
