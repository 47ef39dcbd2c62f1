"""What a whole decode step launches and waits for, on a GPU that is not here; masks and flags that nobody waits for."""

from importlib.util import find_spec

import pytest
import torch
from tiny_models import make_model

import kv_hf
from kv_hf.pages import moved
from kv_hf.pages.step import Tables, block_table

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)


def counted(steps=70, *, batch=1, context=300, **options):
    """Return what each of `steps` steps of two layers launches; every row seals a page in one of them."""
    from host_run import HostRun, gpu
    from measure.shapes import AttentionShape

    with gpu() as fake:
        run = HostRun(AttentionShape(8, 2, 128, 2), batch, context, "int4", **options)
        run.step()
        return [run.count(fake) for _ in range(steps)]


@needs_triton
@pytest.mark.parametrize(
    ("options", "plain", "sealing"),
    [
        ({"reserve_tokens": 512, "batch": 5, "ragged": True}, 2, 3),
        ({"max_length": 512}, 3, 3),
        ({"reserve_tokens": 8192, "context": 4200, "batch": 2, "read_tokens": 512}, 3, 4),
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
    short, long = (counted(3, context=n, reserve_tokens=8192) for n in (300, 4000))
    assert [step.kernels for step in short] == [step.kernels for step in long]


@pytest.fixture
def far(monkeypatch):
    """Let the CPU be a device that has to be waited for."""
    monkeypatch.setattr(moved, "is_host", lambda device: False)


def left_padded(columns, padding):
    return torch.arange(columns)[None] >= torch.tensor(padding)[:, None]


def run(model, cache, masks):
    """Return the logits of a prompt of 40 tokens, of which row 0 pads 5, and of a step of one token for each mask."""
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        given = left_padded(40, [5, 0]).long()
        logits = model(ids, attention_mask=given, past_key_values=cache).logits[:, -1:]
        for mask in masks:
            logits = model(ids[:, :1], attention_mask=mask.long(), past_key_values=cache).logits
    return logits


@pytest.mark.parametrize(
    ("options", "says"),
    [({}, "mask of an earlier forward"), ({"max_length": 64}, "mask of an earlier step")],
    ids=["growing", "preallocated"],
)
def test_a_wrong_mask_of_a_single_token_raises_in_a_later_forward(far, options, says):
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, keys="int8", page_size=16, **options)
    right = [left_padded(columns, [5, 0]) for columns in range(41, 45)]
    holed = left_padded(42, [5, 0])
    holed[1, 20] = False
    with pytest.raises(kv_hf.CacheMismatchError, match=f"attention_{says}"):
        run(model, cache, [right[0], holed, *right[2:]])
    cache.reset()
    found = run(model, cache, right[:3])
    plain = kv_hf.PagedCache(model.config, keys="int8", page_size=16)
    torch.testing.assert_close(found, run(model, plain, right[:3]), atol=1e-5, rtol=1e-5)
    cache.check_integrity()


def test_tables_write_new_pages_in_place_and_follow_every_other_change():
    tables, cpu = Tables(), torch.device("cpu")
    first, grown = ((1, 2), (3,)), ((1, 2), (3, 4))
    shown = tables.show(first)[cpu]
    assert tables.show(first)[cpu] is shown
    wide = tables.show(((1, 2), (3, 4)))[cpu]
    assert wide.data_ptr() == shown.data_ptr() and wide is not shown
    wider, moved_on = ((1, 2, 5), (3, 4)), ((7, 2, 5), (3, 4))
    for pages in (grown, wider, moved_on, ((3, 4), (7, 2, 5)), ((3,), (7,)), ((), ())):
        assert torch.equal(tables.show(pages)[cpu], block_table(pages))
