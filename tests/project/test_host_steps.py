"""What a whole decode step launches and waits for, on a GPU that is not here; masks and flags that nobody waits for."""

from importlib.util import find_spec

import pytest
import torch
from tiny_models import make_model

import kv_hf
from kv_hf.bridge.mask_watch import MaskWatch
from kv_hf.pages import moved
from kv_hf.pages.batch import Batch
from kv_hf.pages.device_flag import DeviceFlag
from kv_hf.pages.step import Row

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)


def counted(steps=70, **options):
    """Return what each of `steps` steps of two layers launches; every row seals a page in one of them."""
    from host_run import HostRun, gpu
    from measure.shapes import AttentionShape

    with gpu() as fake:
        shape = AttentionShape(8, 2, 128, 2)
        settings = {"batch": 1, "context": 300, "keys": "int4", **options}
        run = HostRun(
            shape, settings.pop("batch"), settings.pop("context"), settings.pop("keys"), **settings
        )
        run.step()
        return [run.count(fake) for _ in range(steps)]


@needs_triton
@pytest.mark.parametrize(
    ("options", "plain", "sealing"),
    [
        ({"reserve_tokens": 512}, 2, 3),
        ({"reserve_tokens": 512, "batch": 4}, 2, 3),
        ({"reserve_tokens": 512, "batch": 5, "ragged": True}, 2, 3),
        ({"reserve_tokens": 512, "keys": "int8"}, 2, 3),
        ({"max_length": 512}, 3, 3),
        ({"reserve_tokens": 8192, "context": 4200, "batch": 2, "read_tokens": 512}, 3, 4),
    ],
    ids=[
        "one row",
        "batch",
        "ragged",
        "int8",
        "preallocated",
        "chosen pages",
    ],
)
def test_a_step_launches_few_kernels_and_waits_for_nothing(options, plain, sealing):
    steps = counted(**options)
    assert min(step.in_a_layer for step in steps) == plain
    assert max(step.in_a_layer for step in steps) == sealing
    assert not any(step.waits for step in steps)


@needs_triton
def test_what_is_done_once_per_step_does_not_grow_with_the_context():
    short, long = counted(3, reserve_tokens=8192), counted(3, context=4000, reserve_tokens=8192)
    assert [step.kernels for step in short] == [step.kernels for step in long]


@pytest.fixture
def far(monkeypatch):
    """Let the CPU be a device that has to be waited for."""
    monkeypatch.setattr(moved, "is_host", lambda device: False)


def left_padded(columns, padding):
    return torch.arange(columns)[None] >= torch.tensor(padding)[:, None]


def test_mask_watch_compares_single_tokens_behind_a_trusted_mask_later(far):
    watch, padding = MaskWatch(), Batch.of([Row(3, (), 5), Row(0, (), 8)]).padding
    assert not watch.later(left_padded(9, [3, 0]), True)
    assert watch.hides_padding_only(
        left_padded(9, [3, 0]), padding, True
    )  # waited for: nothing is trusted yet
    holed = left_padded(10, [3, 0])
    holed[1, 4] = False
    assert watch.later(holed, True) and watch.hides_padding_only(holed, padding, True)
    with pytest.raises(kv_hf.CacheMismatchError, match="attention_mask of an earlier forward"):
        watch.look()
    assert not watch.hides_padding_only(holed, padding, True)  # waited for again


def test_mask_watch_compares_several_tokens_at_once(far):
    watch, padding = MaskWatch(), Batch.of([Row(2, (), 5)]).padding
    assert watch.hides_padding_only(left_padded(9, [2]), padding, False)
    assert not watch.hides_padding_only(left_padded(9, [3]), padding, False)
    assert not watch.later(left_padded(9, [2]), True)


def test_a_wrong_mask_of_a_single_token_raises_in_the_next_forward(far):
    model = make_model("llama")
    model.set_attn_implementation("kv_hf")
    cache = kv_hf.PagedCache(model.config, keys="int8", page_size=16)
    ids = torch.randint(3, 90, (2, 40))
    mask = left_padded(43, [5, 0]).long()
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :40], past_key_values=cache)
        model(ids[:, :1], attention_mask=mask[:, :41], past_key_values=cache)
        mask[1, 20] = 0
        model(ids[:, :1], attention_mask=mask[:, :42], past_key_values=cache)
        with pytest.raises(kv_hf.CacheMismatchError, match="earlier forward"):
            model(ids[:, :1], attention_mask=mask[:, :43], past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(ids, attention_mask=left_padded(40, [5, 0]).long(), past_key_values=cache)
    cache.check_integrity()


def test_device_flag_tells_a_step_late_what_was_found(far):
    flag = DeviceFlag(torch.device("cpu"))
    assert flag.look() == 0
    flag.tensor.bitwise_or_(2)
    assert [flag.look(), flag.look()] == [0, 2]
    flag.clear()
    assert [flag.look(), flag.look()] == [0, 0]


def test_a_preallocated_cache_leaves_out_masks_and_reports_wrong_ones_late(far):
    model = make_model("llama")
    model.set_attn_implementation("kv_hf")
    ids = torch.randint(3, 90, (2, 40))
    mask = left_padded(44, [5, 0]).long()

    def run(cache, masks):
        with torch.no_grad():
            logits = model(ids, attention_mask=mask[:, :40], past_key_values=cache).logits[:, -1:]
            for columns, one in masks:
                logits = model(
                    ids[:, :1], attention_mask=one[:, :columns], past_key_values=cache
                ).logits
        return logits

    right = [(41, mask), (42, mask), (43, mask)]
    grown = run(kv_hf.PagedCache(model.config, keys="int8", page_size=16), right)
    fixed = run(kv_hf.PagedCache(model.config, keys="int8", page_size=16, max_length=64), right)
    torch.testing.assert_close(fixed, grown, atol=1e-5, rtol=1e-5)
    holed = mask.clone()
    holed[1, 20] = 0
    cache = kv_hf.PagedCache(model.config, keys="int8", page_size=16, max_length=64)
    with pytest.raises(kv_hf.CacheMismatchError, match="attention_mask of an earlier step"):
        run(cache, [(41, mask), (42, holed), (43, mask), (44, mask)])
    cache.reset()
    run(cache, right)


def test_tables_write_new_pages_in_place_and_follow_every_other_change():
    from kv_hf.pages.tables import Tables, block_table

    tables, cpu = Tables(), torch.device("cpu")
    first = ((1, 2), (3,))
    shown = tables.show(first, {})[cpu]
    assert tables.show(first, {})[cpu] is shown
    grown = ((1, 2), (3, 4))
    after = tables.show(grown, {1: (first[1], grown[1])})[cpu]
    assert after.data_ptr() == shown.data_ptr() and after is not shown
    assert after.tolist() == [[1, 2], [3, 4]]
    wider = ((1, 2, 5), (3, 4))
    assert tables.show(wider, {})[cpu].tolist() == [[1, 2, 5], [3, 4, 0]]
    # a hint about another change is of no use: the first page of row 0 is another one now
    moved_on = ((7, 2, 5), (3, 4))
    assert tables.show(moved_on, {0: (wider[0], wider[0])})[cpu].tolist() == [[7, 2, 5], [3, 4, 0]]
    for pages in (((3, 4), (7, 2, 5)), ((3,), (7,)), ((), ())):
        rows = [Row(0, one, 0) for one in pages]
        assert torch.equal(tables.show(pages, {})[cpu], block_table(rows))
