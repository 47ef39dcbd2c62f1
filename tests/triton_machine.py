"""Run the Triton kernels: in Triton's interpreter, on a GPU, or as compiled for one that is emulated (tools/emulated_gpu.py).

A test says once what to run (`call(attend, asked)`), and `pytest --triton=ptx` or `--triton=cuda` where: the fixture
`machine` chooses.
TRITON_INTERPRET is read when triton is imported, and the tests of compiled kernels need the compiler in the same
pytest process. For the interpreter `call` therefore hands pickled arguments to a worker process that was started with
the variable set; on an emulated GPU it runs on copies here.
"""

import io
import multiprocessing
import os
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
import torch
from harness import slow
from packaging.version import Version
from paged_inputs import OWN

from kv_hf.formats import Format, format_names

_pool = None
runs_kernels = pytest.mark.usefixtures("machine")  # of conftest.py


def compiled_pairs():
    """Keys and values of every format, for tests of compiled kernels; each takes seconds to compile."""
    names = format_names("keys", "values")
    yield from zip(names, [*names[1:], names[0]], strict=True)
    yield "int4", "int4"
    yield "plain4", "plain2"
    yield slow(("plain2", "plain4"))


# what runs kernels: Triton's interpreter, the GPU of this computer, or an emulated one of a compute capability (sm_90)
INTERPRETER, CUDA = "interpreter", "cuda"
MACHINES = {"ptx": ["sm_80", "sm_90"], "cuda": [CUDA]}  # of pytest --triton
_now = INTERPRETER


@contextmanager
def running_on(machine):
    """Let `call` run on a machine within the context, or skip the test where it cannot."""
    global _now
    reason = why_not(machine)
    if reason:
        pytest.skip(reason)
    before, _now = _now, machine
    try:
        yield
    finally:
        _now = before


def skip_where(emulated, reason):
    """Skip a test on an emulated GPU, or where there is none."""
    if emulated == (_now not in (INTERPRETER, CUDA)):
        pytest.skip(reason)


def why_not(machine):
    """The reason why a machine does not run kernels here, or None."""
    try:
        triton = Version(version("triton"))
    except PackageNotFoundError:
        return "triton is not installed (pip install -e '.[gpu]'; wheels exist for Linux)"
    if machine == CUDA:
        return (
            None if torch.cuda.is_available() else "torch sees no GPU (KV_HF_TEST_GPU=1 shows one)"
        )
    if (
        machine == INTERPRETER
        and triton < Version("3.9")
        and Version(version("numpy")) >= Version("2.4")
    ):
        return f"the interpreter of triton {triton} fails in loops of dynamic length with numpy 2.4"
    return None


class Pickler(pickle.Pickler):
    """Pickles formats that are registered nowhere."""

    def reducer_override(self, thing):
        if isinstance(thing, Format) and thing.name in OWN:
            return plain, (thing.name,)
        return NotImplemented


def plain(name):
    """Return a format of OWN, in a worker too."""
    return OWN[name]


def _dumps(things):
    stream = io.BytesIO()
    Pickler(stream).dump(things)
    return stream.getvalue()


def _run(pickled):
    function, args, options = pickle.loads(pickled)
    return _dumps(function(*args, **options))


def _start():
    """Prepare the worker: one thread, and an interpreter that takes a third of the time."""
    from quick_interpreter import quicken

    torch.set_num_threads(1)
    quicken()


def call(function, *args, **options):
    """Return function(*args, **options), computed on copies where kernels run; exceptions come through."""
    if _now == CUDA:
        with torch.device("cuda"):
            moved_function, moved, named = _moved((function, args, options), "cuda")
            return _moved(moved_function(*moved, **named), "cpu")
    if _now == INTERPRETER:
        return _interpreted(function, args, options)
    return _emulated(function, args, options)


def _emulated(function, args, options):
    """What a call gives on copies on an emulated GPU, where memory begins as nan."""
    from emulated_gpu import emulated_gpu

    function, args, options = pickle.loads(_dumps((function, args, options)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with emulated_gpu(int(_now.removeprefix("sm_"))):
            return function(*args, **options)
    finally:
        torch.use_deterministic_algorithms(False)


def _moved(things, device):
    """Copy whatever tensors are in there to a device."""
    stream = io.BytesIO()
    torch.save(things, stream, pickle_module=sys.modules[__name__])
    stream.seek(0)
    return torch.load(stream, map_location=device, weights_only=False)


def _interpreted(function, args, options):
    """Compute in the worker."""
    global _pool
    if _pool is None:
        _pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            _pool.submit(_start).result()
        finally:
            del os.environ["TRITON_INTERPRET"]
    return pickle.loads(_pool.submit(_run, _dumps((function, args, options))).result())


# -- functions that run there --------------------------------------------------------------------------


@contextmanager
def scratch():
    """Fill scratch with nan before a launch; yield what the launches were given."""
    from kv_hf.backends.triton.direct import Plan

    made, real = [], Plan.parts

    def poisoned(self, index):
        made.append(real(self, index))
        for part in made[-1]:
            part.fill_(float("nan"))
        return made[-1]

    Plan.parts = poisoned
    try:
        yield made
    finally:
        Plan.parts = real


def attend(asked, *, splits=2):
    """The decode kernel as compiled for no GPU in particular; splits: 0 for what a launch would take."""
    from kv_hf.backends.triton import decode
    from kv_hf.backends.triton.direct import Plan

    rule = Plan.splits
    Plan.splits = (lambda self, width: splits) if splits else rule
    try:
        with scratch():
            return decode.paged_attention(asked)
    finally:
        Plan.splits = rule


def choose(asked, *, splits=3):
    """The kernel that chooses pages: (block table, numbers of pages, masses of pages)."""
    from kv_hf.backends.triton import selection
    from kv_hf.backends.triton.direct import Plan

    rule, Plan.splits = Plan.splits, lambda self, width: splits
    try:
        with scratch() as made:
            table, counts = selection.choose_pages(asked)
    finally:
        Plan.splits = rule
    [(_, _, masses)] = made
    return table, counts, masses.view(asked.kv.rows, -1)[:, : asked.kv.block_table.shape[1]]


# -- sealing, appending, dense tensors ----------------------------------------------------------------------------------


def write(asked):
    """Append and seal both sides; returns what was asked with what was written."""
    from kv_hf.backends.triton import pages

    pages.write(asked)
    return replace(asked, launches={})


def dense(kv, side):
    """Write a side out in the worker; memory that the kernel leaves alone holds nan.

    The interpreter cuts off where it turns float32 into bfloat16; here it rounds to even, as the GPUs do.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from kv_hf.backends.triton.pages import dense_side

    builder = interpreter.InterpreterBuilder
    cut = builder.create_fp_trunc

    def rounded(self, x, wanted):
        if wanted.scalar != tl.bfloat16 or x.dtype.scalar != tl.float32:
            return cut(self, x, wanted)
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16)
        return type(x)(bits.numpy().view(np.uint16), tl.bfloat16)

    builder.create_fp_trunc = rounded
    torch.use_deterministic_algorithms(True)
    try:
        return dense_side(kv, side)
    finally:
        torch.use_deterministic_algorithms(False)
        builder.create_fp_trunc = cut
