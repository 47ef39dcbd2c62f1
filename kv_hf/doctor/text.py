"""The diagnosis as plain text: symbols in brackets, readable without colours."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ..formats import is_cache_name
from ..text_table import wrap
from .diagnosis import Diagnosis
from .findings import NOTE, OK, SYMBOLS, WARNING, Finding
from .kernels import PREFIX, FormatReport
from .self_test import SelfTest
from .trials import Trial

FIRST_COLUMN = re.compile(r" *\S.*?  +(?=\S)")
INDENT = 4  # blanks before the rest of a line without columns


def described(diagnosis: Diagnosis, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of all sections but the self-test; seams that are as tested are counted, or listed if `verbose`."""
    for what, found in diagnosis.environment:
        yield f"{what:<15} {found}"
    yield ""
    yield "Installation:"
    yield from _findings(diagnosis.health)
    yield ""
    yield "Seams of transformers:"
    yield from _seams(diagnosis.seams, verbose)
    subject = diagnosis.subject
    sizes = f"head_dim {subject.head_dim}"
    if subject.latent is not None:
        sizes = f"latents of {subject.latent[0]} and RoPE keys of {subject.latent[1]}"
    yield ""
    where = f"{subject.dtype_name}, {sizes}, page_size {subject.page_size}"
    yield f"Pages on {subject.device}: {where}"
    yield from _formats(diagnosis.formats)
    if diagnosis.layers:
        yield ""
        yield f"Layers of {subject.model}:"
        for layers, how in diagnosis.layers:
            yield f"  {layers:<13} {how}"


def fitted(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines of at most `width` characters: a long one goes on below its second column."""
    for line in lines:
        first = FIRST_COLUMN.match(line)
        yield from wrap(line, width, len(first.group()) if first else INDENT)


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"  {SYMBOLS[finding.status]} {finding.name:<14} {finding.detail}"


def _seams(findings: Sequence[Finding], verbose: bool) -> Iterator[str]:
    told = [one for one in findings if verbose or one.status != OK or one is findings[0]]
    yield from _findings(told)
    rest = len(findings) - len(told)
    if rest:
        yield f"  {SYMBOLS[OK]} {rest} seams found, and those that kv_hf counts on as they were tested"


def _formats(reports: Sequence[FormatReport]) -> Iterator[str]:
    for report in reports:
        name = PREFIX + report.format
        name = name if is_cache_name(name) else report.format
        yield f"  {name:<13} {report.kernel or 'none'}"
    yield ""
    yield "Why not another kernel:"
    for name in {name: None for report in reports for name, _ in report.others}:
        reasons = {
            reason or "can run, but a faster one is there": None
            for report in reports
            for other, reason in report.others
            if other == name
        }
        for reason in reasons:
            yield f"  {name:<13} {reason}"


def tested(result: SelfTest) -> Iterator[str]:
    """Yield the lines of the self-test: one for each format, and one for each trial that is not ok."""
    rows: dict[str, list[Trial]] = {}
    for trial in result.trials:
        rows.setdefault(trial.format, []).append(trial)
    for name, trials in rows.items():
        well = [_short(trial) for trial in trials if trial.status == OK]
        if well:
            yield f"  {SYMBOLS[OK]} {name:<32} {', '.join(well)}"
        for trial in trials:
            if trial.status not in (OK, NOTE):
                where = f"{trial.what}, {trial.kernel}"
                yield f"  {SYMBOLS[trial.status]} {name:<32} {where}: {trial.detail}"
    left = [trial for trial in result.trials if trial.status == NOTE]
    if left:
        yield (
            f"  {SYMBOLS[NOTE]} {len(left)} trials left out: {left[0].detail} (kernels that a first use compiles are there "
            "the next time; --seconds N gives more time)"
        )
    yield f"  {len(result.trials) - len(left)} trials in {result.seconds:.1f} s"


def _short(trial: Trial) -> str:
    """Say what went well: the kernel, and how far it was from the reference."""
    if trial.what != "attend":
        return (
            f"{trial.kernel} seals" if trial.what == "seal" else "its tokens are the expected ones"
        )
    return f"{trial.kernel} {trial.error:.1g} (bound {trial.bound:.1g})"


def verdict(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what is broken, or that nothing is."""
    if not diagnosis.broken:
        warned = [one for one in (*diagnosis.health, *diagnosis.seams) if one.status == WARNING]
        more = f", {len(warned)} warnings above" if warned else ""
        yield f"Nothing is broken{more}."
        return
    yield f"{len(diagnosis.broken)} broken:"
    for line in diagnosis.broken:
        yield f"  {line}"
