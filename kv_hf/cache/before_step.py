"""A layer's contents while the layers in front of it are one forward ahead: a model may read them before it updates them."""

from typing import Any

from ..backends.inputs import PagedKV


def before_step(layer: Any) -> PagedKV | None:
    """Return pages and window of a paged layer that has not joined the running forward yet; None where they do not show it.

    Left padding that was not stored would be read as zeros, where DynamicCache has numbers: nothing is returned then.
    """
    group, store = layer.group, layer.store
    step = group.lockstep.step
    behind = layer._epoch == group.epoch - 1 and not group.lockstep.opening
    if store is None or step is None or not behind or layer.layer_idx in group.lockstep.begun:
        return None
    if layer.window is not None or group.batch.padding.any():
        return None
    if step.view is None or step.view.starts is None or step.seal_first is not None:
        return None
    seen = layer.get_seq_length()
    kv: PagedKV = store.kv(
        step.view.before(seen), *(window.tokens for window in store.windows), seen
    )
    return kv
