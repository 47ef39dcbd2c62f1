"""Caches of others at their best, by names that every command of the evaluation then takes (docs/peers.md).

quanto_int4_channel, quanto_int2_channel, hqq_int4_channel, hqq_int2_channel    channel_keys.py
kivi_int4, kivi_int2, kivi_int4_window, kivi_int2_window                        kivi.py
turboquant_int4, turboquant_int2, turboquant_prod_int4                          turboquant.py
turboquant_package_int4, turboquant_package_int2                                turboquant_package.py
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kv_hf import register_format, unregister_format
from kv_hf.cache_names import PEERS
from kv_hf.evaluation import register_peer, unregister_peer
from kv_hf.formats import ATTENTION_NAME
from kv_hf.formats.registry import is_registered
from measure.peers import channel_keys, kivi, turboquant, turboquant_package
from measure.peers.paged_peer import Make, paged_peer


@contextmanager
def known_peers() -> Iterator[None]:
    """Make all formats and names of this folder known for a while; what is known already stays."""
    with ExitStack() as undo:
        for kind in (*kivi.FORMATS, *turboquant.FORMATS):
            if not is_registered(kind):
                register_format(kind)
                undo.callback(unregister_format, kind.name)
        for name, (make, attention) in _caches().items():
            if name not in PEERS:
                register_peer(name, make, attention)
                undo.callback(unregister_peer, name)
        yield


def _caches() -> dict[str, tuple[Make, str]]:
    """Return what makes each cache, and the attention that reads it."""
    pages = {**kivi.CACHES, **turboquant.CACHES}
    others = {**channel_keys.CACHES, **turboquant_package.CACHES}
    found: dict[str, tuple[Make, str]] = {
        name: (paged_peer(options), ATTENTION_NAME) for name, options in pages.items()
    }
    return {**found, **{name: (make, "sdpa") for name, make in others.items()}}
