"""A forked child and its parent's cache: pages in a file belong to the process that made it."""

import gc
import os
import sys
import traceback

import pytest
import torch
from token_states import FULL, PAGE, dense, feed, same, text

import kv_hf

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
ROWS = [text(1, 400)]


def in_child(work):
    """Run `work` in a forked child; return whether it ended without an exception, its exit handlers included."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def filled(**options):
    cache = kv_hf.PagedCache(FULL, page_size=PAGE, keys="int4", **options)
    feed(cache, ROWS, 0, 200)
    feed(cache, ROWS, 200, 201)
    return cache


def test_child_is_refused_before_anything_is_written_and_the_parent_goes_on():
    cache, plain = filled(offload="disk"), filled()
    assert cache.memory().offloaded
    before = dense(plain)

    def append():
        """The 30 tokens fill a page: the child would have sealed it into its parent's file."""
        with pytest.raises(kv_hf.OffloadError, match="forked from it.*Nothing was touched"):
            feed(cache, ROWS, 201, 231)
        assert cache.get_seq_length() == 201
        with pytest.raises(kv_hf.OffloadError, match="forked from it"):
            feed(cache, ROWS, 201, 202)

    assert in_child(append)
    assert same(dense(cache), before)
    for one in (cache, plain):
        feed(one, ROWS, 201, 300)
    assert same(dense(cache), dense(plain))


def test_child_cannot_read_pages_that_its_parent_may_change():
    cache = filled(offload="disk")
    cache.arena.staging(torch.device("cpu")).resize(
        0
    )  # nothing is left in buffers of the child's own

    def read():
        with pytest.raises(kv_hf.OffloadError, match="forked from it"):
            _ = cache.layers[0].keys

    assert in_child(read)
    cache.check_integrity()


def test_child_that_resets_or_drops_the_cache_leaves_the_parent_its_file(tmp_path):
    cache, plain = filled(offload="disk", offload_dir=tmp_path), filled()

    def begin_anew():
        cache.reset()
        feed(cache, ROWS, 0, 200)
        feed(cache, ROWS, 200, 201)
        assert same(dense(cache), dense(plain))

    def drop():
        nonlocal cache
        del cache
        gc.collect()

    for work in (begin_anew, drop):
        assert in_child(work)
        assert same(dense(cache), dense(plain))


def test_child_may_use_a_cache_whose_pages_are_in_memory():
    cache, plain = filled(), filled()
    before = dense(cache)

    def go_on():
        feed(cache, ROWS, 201, 300)

    assert in_child(go_on)
    assert same(dense(cache), before)
    for one in (cache, plain):
        feed(one, ROWS, 201, 260)
    assert same(dense(cache), dense(plain))
