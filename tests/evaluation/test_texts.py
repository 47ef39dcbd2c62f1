"""The bundled texts: five kinds to measure on, the same five from other sources to fit on."""

from importlib.resources import files

import pytest

from kv_hf import texts
from kv_hf.evaluation.needles import load_haystack

DATA = files("kv_hf") / "evaluation" / "data"


def words(name):
    """Return the words of a text, in runs of eight: what two texts of one source would share."""
    found = texts.load_text(name).split()
    return {tuple(found[i : i + 8]) for i in range(len(found) - 7)}


@pytest.mark.parametrize("name", texts.BUNDLED)
def test_load_text_gives_every_bundled_text_and_its_source_is_named(name):
    assert len(texts.load_text(name)) > 8_000
    assert f"| {name}.txt |" in (DATA / "SOURCES.md").read_text("utf-8")


def test_bundled_names_every_file_of_the_folder():
    there = {file.name.removesuffix(".txt") for file in DATA.iterdir() if file.name.endswith("txt")}
    assert there == {*texts.BUNDLED, "nouns"}  # nouns are what needles are made of


def test_held_out_shares_no_text_with_calibration():
    fitted = set().union(*map(words, texts.CALIBRATION))
    for name in texts.HELD_OUT:
        held_out = words(name)
        assert len(held_out & fitted) < 0.005 * len(held_out), name


def test_haystack_of_speeches_stays_that_of_two_speeches():
    both = " ".join(" ".join(map(texts.load_text, ("lincoln_1862", "lincoln_1863"))).split())
    assert " ".join(map("".join, load_haystack("lincoln").sentences)) == both
