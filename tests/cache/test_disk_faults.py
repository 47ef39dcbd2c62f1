"""Saving and converting where any system call may fail, or be the last one: the old is intact or the new is complete."""

import errno
import os
import shutil

import pytest
import tiny_mha
import torch
from faults import ERRORS, failing, faults, killed_at
from tiny_mha import digest
from tiny_models import shared_model, tokens

import kv_hf
from kv_hf import files

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def left_in(folder):
    return [path.name for path in folder.rglob("*") if path.name.endswith(files.UNFINISHED)]


@pytest.fixture(scope="module")
def caches():
    """Two caches of one model, of which the first is the old and the second the new one."""
    model = shared_model("llama")
    found = []
    for length in (50, 90):
        cache = kv_hf.PagedCache(model.config, keys="int8", values="int4", page_size=16)
        with torch.no_grad():
            model(tokens(1, length), past_key_values=cache)
        found.append(cache)
    return model, found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_mha.save(tiny_mha.make("llama"), tmp_path_factory.mktemp("mha") / "source")


def save_of(caches, folder):
    model, (old, new) = caches
    path = folder / "cache"
    old.save(path, model)
    path.chmod(0o600)

    def check():
        assert path.stat().st_mode & 0o777 == 0o600
        return kv_hf.PagedCache.load(path, model).get_seq_length()

    return lambda: new.save(path, model), check, (50, 90)


def conversion_of(checkpoint, folder):
    target = folder / "new"
    kv_hf.convert_to_gqa(checkpoint, folder / "whole", 2)
    whole = digest(folder / "whole")
    return (
        lambda: kv_hf.convert_to_gqa(checkpoint, target, 2),
        lambda: digest(target) if target.exists() else None,
        (None, whole),
    )


def calls_of(folder, work):
    with faults(folder) as seen:
        work()
    return seen.seen


def undo(folder, states):
    """Take a conversion's result away again, as the next one wants a place of its own."""
    if states[0] is None:
        shutil.rmtree(folder / "new", ignore_errors=True)


def error_of(work):
    """What it says when it fails, None where it does not."""
    try:
        work()
    except (OSError, kv_hf.ConversionError) as error:
        return str(error)
    return None


def check_errors(folder, make, places, errors, lasting=False):
    """Let each of these calls fail with each of these errors; return how often."""
    count = 0
    for at in places:
        for number in errors:
            work, content, states = make()
            with faults(folder, at, failing(number), lasting):
                said = error_of(work)
            found = content()
            assert said is None or os.strerror(number) in said
            assert found in states and (said or found == states[1]), (at, number)
            undo(folder, states)
            work()
            assert content() == states[1] and not left_in(folder), (at, number)
            undo(folder, states)
            count += 1
    return count


def check_kills(folder, make, places):
    """End a process at each of these calls; return how often."""
    for at in places:
        work, content, states = make()
        assert killed_at(folder, at, work)
        assert content() in states, at
        undo(folder, states)
        work()
        assert content() == states[1] and not left_in(folder), at
        undo(folder, states)
    return len(places)


KINDS = {"cache": save_of, "conversion": conversion_of}


@pytest.fixture
def make(tmp_path, caches, checkpoint):
    def of(kind):
        given = checkpoint if kind == "conversion" else caches
        if kind != "conversion":
            return lambda: KINDS[kind](given, tmp_path)
        made = KINDS[kind](given, tmp_path)  # the whole result once, to compare with
        return lambda: made

    return of


def places_of(tmp_path, begin):
    """The calls of one piece of work, by name."""
    work, _, states = begin()
    seen = calls_of(tmp_path, work)
    undo(tmp_path, states)
    return seen


def some(seen):
    """The first and the last call of every kind: all that differ but for the piece that is written."""
    first = {name: place for place, name in reversed(list(enumerate(seen)))}
    last = {name: place for place, name in enumerate(seen)}
    return sorted({*first.values(), *last.values()})


@pytest.mark.parametrize("kind", KINDS)
def test_calls_may_fail(kind, make, tmp_path):
    begin = make(kind)
    seen = places_of(tmp_path, begin)
    assert {"mkdir", "fsync", "close"} <= set(seen)
    errors = (errno.ENOSPC, errno.EIO) if kind == "cache" else (errno.ENOSPC,)
    assert check_errors(tmp_path, begin, some(seen), errors) >= 6
    if kind == "cache":
        check_errors(tmp_path, begin, some(seen), (errno.ENOSPC,), lasting=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_may_be_killed_at_calls(kind, make, tmp_path):
    begin = make(kind)
    places = some(places_of(tmp_path, begin))
    assert check_kills(tmp_path, begin, places if kind == "cache" else places[::2]) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sweep_of_every_call_and_error(kind, make, tmp_path, capsys):
    """The whole of the above; prints the counts that docs/reliability.md tells."""
    begin = make(kind)
    seen = places_of(tmp_path, begin)
    places = range(len(seen))
    failed = check_errors(tmp_path, begin, places, ERRORS)
    failed += check_errors(tmp_path, begin, places, (errno.ENOSPC,), lasting=True)
    killed = check_kills(tmp_path, begin, places)
    assert failed == 5 * len(seen) and killed == len(seen)
    with capsys.disabled():
        print(f"\n{kind}: {len(seen)} calls, {failed} failures, {killed} kills")
