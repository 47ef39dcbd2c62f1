"""The damage that formats do to pages: what it does not depend on, what it counts, and which pages say nothing."""

import pytest
import torch
from paged_inputs import page_spec as spec

from kv_hf.quant.strain import Sample, usual_damage
from kv_hf.spec import LANES, ROWS

FORMATS = ("fp8", "int8", "int4", "int2")


def pages(seed=0):
    return torch.randn((2, 2, 64, 64), generator=torch.Generator().manual_seed(seed))


def scaled(numbers, factor, channel=5):
    numbers = numbers.clone()
    numbers[:, 0, :, channel] *= factor
    return numbers


@pytest.mark.parametrize("layout", [ROWS, LANES])
@pytest.mark.parametrize("name", FORMATS)
def test_random_numbers_take_the_usual_damage(name, layout):
    made = spec(name, layout=layout)
    sample = Sample(pages(1), pages(2))
    assert sample.says_something
    for side in range(2):
        found = sample.strain(made, side)
        assert found.level == pytest.approx(usual_damage(made.sides[side]), rel=0.25)
        assert found.shrinkage == 1


@pytest.mark.parametrize("name", FORMATS)
def test_strain_of_pages_does_not_depend_on_their_size(name):
    made, keys, values = spec(name), pages(1), pages(2)
    for factor in (2.0**-5, 2.0**8):
        for side in range(2):
            expected = Sample(keys, values).strain(made, side)
            found = Sample(keys * factor, values * factor).strain(made, side)
            assert found.level == pytest.approx(expected.level, rel=0.02)
            assert found.shrinkage == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(("name", "least"), [("int8", 300), ("int4", 80), ("int2", 10)])
def test_a_loud_value_channel_raises_the_damage_of_the_others(name, least):
    made = spec(name)
    found = Sample(pages(1), scaled(pages(2), 100)).strain(made, 1)
    assert found.level > least * usual_damage(made.values)


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_keys_with_scales_of_their_own_channel_take_no_damage_from_a_loud_one(name):
    made = spec(name)
    loud, plain = (Sample(keys, pages(2)) for keys in (scaled(pages(1), 100), pages(1)))
    assert loud.strain(made, 0).level == pytest.approx(plain.strain(made, 0).level, rel=0.02)


def test_a_constant_of_all_keys_is_no_damage():
    made, keys = spec("int4"), pages(1)
    found = Sample(keys + 300, pages(2)).strain(made, 0)
    assert found.level == pytest.approx(Sample(keys, pages(2)).strain(made, 0).level, rel=0.2)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_too_small_for_scales_shrink(name):
    found = Sample(pages(1), pages(2) * 1e-8).strain(spec(name), 1)
    assert found.shrinkage > 2
    assert found.damage > usual_damage(spec(name).values)


def test_a_few_small_tokens_shrink_although_their_errors_are_small():
    values = pages(2)
    values[:, :, ::4] *= 1e-6
    assert Sample(pages(1), values).strain(spec("int8"), 1).shrinkage > 2


def test_channels_that_hold_nothing_do_not_count():
    made, values = spec("int4"), pages(2)
    dead = values.clone()
    dead[..., :8] = 0
    found = Sample(pages(1), dead).strain(made, 1).level
    assert found == pytest.approx(Sample(pages(1), values).strain(made, 1).level, rel=0.2)


@pytest.mark.parametrize("different", [1, 2])
def test_pages_of_one_or_two_tokens_say_nothing(different):
    values = pages(2)[:, :, :different].repeat(1, 1, 64 // different, 1)
    assert not Sample(pages(1), values).says_something


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e5])
def test_pages_beyond_float16_say_nothing(bad):
    values = pages(2)
    values[0, 1, 3, 7] = bad
    keys = pages(1)
    sample = Sample(keys, values)
    assert sample.counts.tolist() == [False, True]
    found = sample.strain(spec("int4"), 1)
    expected = Sample(keys[1:], values[1:]).strain(spec("int4"), 1)
    assert found.level == pytest.approx(expected.level, rel=1e-4)
    values[1, 0, 0, 0] = bad
    assert not Sample(keys, values).says_something


def test_exact_pages_take_no_damage():
    found = Sample(pages(1), scaled(pages(2), 1000)).strain(spec("exact"), 1)
    assert (found.level, found.damage) == (0, 0)
    assert usual_damage(spec("exact").values) == 0
