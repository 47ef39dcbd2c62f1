"""What a whole decode step launches and waits for, on a GPU that is not here."""

import os
import sys
from importlib.util import find_spec

import pytest
import torch
from tiny_models import make_model, tokens

import kv_hf
from kv_hf.backends.cpu import library
from kv_hf.bridge.masks import within_generate

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)


def counted(steps=20, *, batch=1, context=300, **options):
    """Return what each of `steps` steps of two layers launches; every row seals a page in one of them."""
    from fake_driver import HostRun, gpu
    from measure.shapes import AttentionShape

    with gpu() as fake, within_generate():
        shape = AttentionShape(8, 2, 128, 2)
        run = HostRun(shape, batch, context, "int4", page_size=16, **options)
        run.step()
        return [run.count(fake) for _ in range(steps)]


@needs_triton
@pytest.mark.parametrize(
    ("options", "plain", "sealing"),
    [
        ({"max_length": 512, "batch": 5, "ragged": True}, 3, 4),
        ({"max_length": 512}, 3, 4),
        ({"max_length": 8192, "context": 4200, "batch": 2, "read": 512}, 5, 6),
    ],
    ids=["ragged", "preallocated", "chosen pages"],
)
def test_a_step_launches_few_kernels_and_waits_for_nothing(options, plain, sealing):
    steps = counted(**options)
    assert min(step.in_a_layer for step in steps) == plain
    assert max(step.in_a_layer for step in steps) == sealing
    assert not any(step.waits for step in steps)


@needs_triton
def test_what_is_done_once_per_step_does_not_grow_with_the_context():
    short, long = (counted(3, context=n, max_length=8192) for n in (300, 4000))
    assert [step.kernels for step in short] == [step.kernels for step in long]


@pytest.mark.skipif(
    library.missing() is not None, reason=f"counts the C kernel: {library.missing()}"
)
@pytest.mark.parametrize("options", [{}, {"max_length": 256}], ids=["growing", "max_length"])
def test_a_layer_of_a_decode_step_makes_few_python_calls(options):
    """Short texts are bound by the host: each call counts, those of the backends apart."""
    model = make_model("llama", num_hidden_layers=4)
    cache = kv_hf.PagedCache(model.config, keys="int8", **options)
    calls = {-1: 0}

    def count(frame, event, arg):
        code = frame.f_code
        ours = f"{os.sep}kv_hf{os.sep}" in code.co_filename
        if event != "call" or not ours or f"{os.sep}backends{os.sep}" in code.co_filename:
            return
        if code.co_qualname == "PagedCache.update":
            calls[frame.f_locals["layer_idx"]] = 0
        calls[max(calls)] += 1

    with torch.no_grad():
        for length in (100, 1, 1):
            model(tokens(1, length), past_key_values=cache)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            model(tokens(1, 1), past_key_values=cache)
        finally:
            sys.setprofile(before)
    assert calls[-1] <= 16
    assert calls[0] <= 30
    assert all(calls[layer] <= 13 for layer in (1, 2, 3)), calls
