"""Shared settings: a known environment, one thread per worker, quiet transformers, and kv_hf's "said once" memory cleared."""

import known_environment  # isort: split

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging
from triton_machine import INTERPRETER, MACHINES, running_on

import kv_hf
from kv_hf import notices
from kv_hf.notices import forget

# a shell that starts tests in the background lets them ignore Ctrl-C, which some tests send to themselves
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# one per worker is fastest; scripts/environments.py tries more
torch.set_num_threads(int(os.environ.get("KV_HF_TEST_THREADS", "1")))
logging.set_verbosity_error()
# what kv_hf says is tested, and pytest's caplog listens at the root
notices.logger.setLevel("WARNING")
logging.enable_propagation()
logging.disable_progress_bar()
settings.register_profile("kv_hf", deadline=None, derandomize=True)
settings.load_profile("kv_hf")


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_no_garbage() -> None:
    """Let a full collection look at the objects of this file's tests alone.

    The imported libraries and all collected tests are most of a worker's objects. The scripts and the tests that
    measure memory collect dozens of times, a third of a second each while they pass over all of them.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say what runs the Triton kernels."""
    parser.addoption(
        "--triton",
        choices=("interpreter", *MACHINES),
        default="interpreter",
        help="what runs Triton kernels: its interpreter; or emulated GPUs or a GPU, and then no other tests",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out to which a GPU makes no difference."""
    if config.getoption("--triton") in MACHINES:
        items[:] = [item for item in items if "machine" in getattr(item, "fixturenames", ())]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of Triton kernels once on each emulated GPU if they are asked for; some never in the interpreter."""
    if "machine" in metafunc.fixturenames:
        compiled = metafunc.definition.get_closest_marker("compiled")
        own = "sm_90" if compiled else INTERPRETER
        machines = MACHINES.get(metafunc.config.getoption("--triton"), [own])
        metafunc.parametrize("machine", machines, indirect=True)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let triton_machine.call run kernels where --triton says."""
    with running_on(request.param):
        yield


@pytest.fixture
def gpu() -> Iterator[Any]:
    """Take the CPU for a GPU on which launches are counted and do nothing; the test is skipped without triton."""
    pytest.importorskip("triton")
    from fake_driver import pretend_gpu

    with pretend_gpu() as fake:
        yield fake


def pytest_sessionfinish() -> None:
    """Let the interpreter collect what was frozen, or bindings report all of it as leaked when it ends."""
    gc.unfreeze()


def pytest_configure() -> None:
    """Warn as Python does by itself."""
    known_environment.forget_warnings()


def pytest_unconfigure() -> None:
    """Remove the home folder of the tests."""
    known_environment.leave()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Take back what a test, or a library that it called, put into the environment."""
    before = os.environ.copy()
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def said() -> Iterator[Callable[[str], list[str]]]:
    """Return the texts of kv_hf's warnings so far that hold a word; which kernel reads the pages depends on the machine."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", kv_hf.KVCacheWarning)
        yield lambda word="": [
            str(one.message)
            for one in found
            if one.category is kv_hf.KVCacheWarning and word in str(one.message)
        ]


@pytest.fixture(autouse=True)
def _fresh_notices() -> Iterator[None]:
    """Let each test see the warnings that are said once per process, and find kv_hf installed."""
    kv_hf.install()
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kv_hf.KVCacheWarning)
        yield
