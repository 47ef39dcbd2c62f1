"""Several texts in one run: each as if it had been measured alone, and all of them pooled."""

import pytest
import torch
from tiny_models import make_model, tokens

import kv_hf
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.evaluation.by_text import block_means, measure_texts, paired_difference
from kv_hf.evaluation.distances import block_interval

PROMPT = 40
TEXTS = {
    "one": [tokens(1, 200, seed=0)[0], tokens(1, 150, seed=1)[0]],
    "two": [tokens(1, 180, seed=2)[0]],
}


@pytest.fixture(scope="module")
def model():
    made = make_model("llama")
    made.set_attn_implementation("kv_hf")
    return made


@pytest.fixture(scope="module")
def caches(model):
    options = {"page_size": 16, "sink_tokens": 0}
    return {
        keys: lambda keys=keys: kv_hf.PagedCache(model.config, keys=keys, values="int4", **options)
        for keys in ("int8", "int2")
    }


@pytest.fixture(scope="module")
def found(model, caches):
    return measure_texts(model, TEXTS, caches, PROMPT)


def test_measure_texts_gives_each_text_what_it_gets_alone(model, caches, found):
    for name, windows in TEXTS.items():
        alone = measure_accuracy(model, windows, caches, PROMPT)
        for cache, accuracy in alone.items():
            assert found[cache].texts[name] == accuracy


def test_measure_texts_pools_all_windows(model, caches, found):
    flat = [ids for windows in TEXTS.values() for ids in windows]
    for cache, accuracy in measure_accuracy(model, flat, caches, PROMPT).items():
        assert found[cache].pooled == accuracy
        assert accuracy.tokens == 200 + 150 + 180 - 3 * PROMPT


def test_measure_texts_names_the_worst_text(found):
    for several in found.values():
        worst = max(several.texts.values(), key=lambda one: one.kl_mean)
        assert several.row()["worst_text"] == several.worst
        assert several.texts[several.worst] == worst
        assert worst.kl_mean > several.pooled.kl_mean


def test_measure_texts_keeps_blocks_that_give_the_mean(found):
    for several in found.values():
        for name, windows in TEXTS.items():
            lengths = [len(ids) - PROMPT for ids in windows]
            total = 0.0
            for length, blocks in zip(lengths, several.kl_blocks[name], strict=True):
                assert len(blocks) == -(-length // 64)
                sizes = [min(64, length - 64 * at) for at in range(len(blocks))]
                total += sum(size * mean for size, mean in zip(sizes, blocks, strict=True))
            assert total / sum(lengths) == pytest.approx(several.texts[name].kl_mean, rel=1e-6)


def test_measure_texts_refuses_a_text_without_windows(model, caches):
    with pytest.raises(ValueError, match="at least one window of each text, got none of 'two'"):
        measure_texts(model, {**TEXTS, "two": []}, caches, PROMPT)


def test_block_means_cuts_the_last_block_short():
    assert block_means(torch.arange(130.0)) == [31.5, 95.5, 128.5]


def test_paired_difference_tells_apart_what_single_intervals_do_not():
    """Hard passages are hard for both caches: they cancel out block by block."""
    generator = torch.Generator().manual_seed(0)
    hard = torch.rand(60, generator=generator, dtype=torch.float64) ** 4
    noise = 0.01 * torch.rand(60, generator=generator, dtype=torch.float64)
    here = {"a": [(hard + noise + 0.01).tolist()]}
    mean, low, high = paired_difference(here, {"a": [hard.tolist()]})
    assert 0.01 < low < mean < high < 0.02
    assert mean == pytest.approx((noise + 0.01).mean().item())
    single_low, single_high = block_interval([hard], block=1)
    assert single_high - single_low > 10 * (high - low)
    assert paired_difference(here, here) == (0, 0, 0)


@pytest.mark.parametrize("there", [{"a": [[1.0]]}, {"b": [[1.0, 2.0]]}, {"a": [[1.0, 2.0]] * 2}])
def test_paired_difference_refuses_other_texts(there):
    with pytest.raises(ValueError, match="blocks of the same windows"):
        paired_difference({"a": [[1.0, 2.0]]}, there)
