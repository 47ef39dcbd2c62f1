"""Chunks of many queries on a filled cache read the pages in slices; the reference takes them whole."""

import pytest
import torch
import transformers

import kv_hf
from kv_hf.kernels import choice, ops
from kv_hf.kernels.cpu import library

PADDING = torch.tensor([0, 90, 25])


def filled(keys, chunk, window=None, past=101):
    """The keys and values of a chunk behind `past` columns of three rows; the second begins inside of the chunk."""
    options = {"sliding_window": window} if window else {}
    name = "MistralConfig" if window else "LlamaConfig"
    config = getattr(transformers, name)(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        **options,
    )
    padding = PADDING + torch.tensor([0, past - 90 + 10, 0])
    cache = kv_hf.PagedCache(config, keys=keys, page_size=16)
    cache.observe_padding((torch.arange(past + chunk) >= padding[:, None]).long())
    torch.manual_seed(0)
    states = torch.randn(2, 3, 2, past + chunk, 32)
    cache.update(states[0, :, :, :past], states[1, :, :, :past], 0)
    keys, _ = cache.update(states[0, :, :, past:], states[1, :, :, past:], 0)
    real = torch.arange(past, past + chunk) >= padding[:, None]
    return keys.view_of_pages, real


@pytest.mark.parametrize("keys", ["exact", "int8", "int4"])
@pytest.mark.parametrize("chunk", [17, 32, 45, 130])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"sinks": True}, {"mask": True}], ids=str
)
@pytest.mark.parametrize("window", [None, 24])
def test_slices_equal_the_whole(keys, chunk, options, window):
    if library.missing():
        pytest.skip(library.missing())
    view, real = filled(keys, chunk, window)
    assert view.kernel.name == "c" and view.kernel.longest > chunk
    query = torch.randn(3, 4, chunk, 32)
    given = {"softmax_scale": 0.2, "softcap": options.get("softcap")}
    if "sinks" in options:
        given["sink_logits"] = torch.randn(4)
    if "mask" in options:
        columns = torch.arange(view.kv.seen)
        at = view.kv.seen - chunk + torch.arange(chunk)[:, None]
        mask = (columns <= at) & (columns % 5 != 3)
        mask = mask & (columns > at - window) if window else mask
        given["mask"] = (mask & (columns >= view.kv.padding[:, None, None]))[:, None]
    whole, sliced = (
        ops.paged_attention(
            query, view.kv, sliding_window=view.sliding_window, kernel=kernel, **given
        )
        for kernel in ("reference", view.kernel)
    )
    assert torch.isfinite(sliced).all()
    shown = real[:, None, :, None].expand_as(whole)
    torch.testing.assert_close(sliced[shown], whole[shown], rtol=0, atol=2e-6)


def test_chunks_go_densely_where_slices_would_be_slower():
    assert choice.load("reference").longest == choice.load("sdpa").longest == 16
