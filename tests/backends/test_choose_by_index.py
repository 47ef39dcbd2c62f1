"""The choice of pages by an index, which holds the words of the keys that a choice reads: it is that of the whole pages."""

from dataclasses import replace

import pytest
import rounding
import torch
from test_choose_pages import FORMATS, assert_same_choice, call_of, long_kv, needs_c

from kv_hf.backends.cpu.choose import choose_pages as choose_in_c
from kv_hf.backends.reference import selection
from kv_hf.page_summary import (
    Summary,
    part_bytes,
    part_fields,
    summary_of,
    summary_words,
    word_channels,
    word_starts,
)
from kv_hf.quant.page_parts import part_of, with_all_words, words_to_read
from kv_hf.spec import LANES
from kv_hf.spec import ROWS as ROWS_LAYOUT


def by_index(kv, words):
    """The same rows over an index of all pages."""
    nothing = {name: one[:0] for name, one in kv.value_pages.items()}
    return replace(
        kv, key_pages=part_of(kv.key_pages, words, kv.spec.keys), value_pages=nothing, words=words
    )


def words_of(kv):
    """Words of one row's pages, as an index fixes them for all rows."""
    if summary_of(kv.spec.keys) is Summary.ALL_CHANNELS:
        return None
    ids = kv.block_table[0, :8].long()
    return words_to_read({name: one[ids] for name, one in kv.key_pages.items()}, kv.spec.keys)


@pytest.mark.parametrize("layout", [LANES, ROWS_LAYOUT])
@pytest.mark.parametrize("dim", [48, 64, 80])
@pytest.mark.parametrize("keys", FORMATS)
def test_an_index_holds_the_words_that_are_read_and_no_others(keys, dim, layout):
    kv = long_kv(keys, dim=dim, layout=layout, poison=False)
    spec, words = kv.spec.keys, words_of(kv)
    part = part_of(kv.key_pages, words, spec)
    fields = part_fields(spec)
    assert {name: (tuple(one.shape[1:]), one.dtype) for name, one in part.items()} == fields
    assert part_bytes(spec) == sum(one[0].nbytes for one in part.values())
    assert len(word_starts(spec)) == len(word_channels(spec))
    if words is None:
        return
    assert words.shape == (spec.num_kv_heads, summary_words(spec))
    assert part["codes"].nbytes < kv.key_pages["codes"].nbytes
    back = with_all_words(part, words, spec)["codes"]
    whole = kv.key_pages["codes"]
    assert back.shape == whole.shape and back.dtype == whole.dtype
    again = part_of({**kv.key_pages, "codes": back}, words, spec)["codes"]
    assert torch.equal(again, part["codes"])


@pytest.mark.parametrize("layout", [LANES, ROWS_LAYOUT])
@pytest.mark.parametrize("keys", FORMATS)
def test_masses_by_an_index_are_those_by_the_pages(keys, layout):
    whole = long_kv(keys, layout=layout, rows=[(8, 20)])  # as many pages as fix the words
    call = call_of(whole, q_len=2)
    indexed = replace(call, kv=by_index(whole, words_of(whole)))
    ours, theirs = (selection.page_mass(one) for one in (indexed, call))
    for one, other in zip(ours, theirs, strict=True):
        rounding.assert_close(one, other)


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("keys", FORMATS)
def test_c_chooses_by_an_index_as_the_reference(keys, dim, dtype):
    for page in (16, 64):
        kv = long_kv(keys, dim=dim, dtype=dtype, page=page, slots=page + 24)
        if kv.spec.keys.layout != LANES:
            pytest.skip("codes of this head_dim do not fill words")
        indexed = by_index(kv, words_of(kv))
        for options in ({"q_len": 1}, {"q_len": 3, "group": 3, "softcap": 20.0}):
            call = call_of(indexed, dtype=dtype, **options)
            assert_same_choice(call, choose_in_c(call))
            again = choose_in_c(replace(call, kv=kv))  # blocks of both are kept apart
            assert_same_choice(replace(call, kv=kv), again)
