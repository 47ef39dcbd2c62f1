"""The bytes that a decode step has to read, and the most tokens per second that a memory's bandwidth allows.

A bound, not a forecast: computing, writing, launching kernels and talking between devices take their time on top.
"""

from dataclasses import dataclass

from ..config_reading import read_budget
from ..page_summary import part_bytes
from ..spec import ROWS, MemoryReport
from .choices import Choice
from .growing import index_bytes, state_bytes
from .inventory import Inventory
from .paged import layer_formats, page_groups, row_sizes


@dataclass(frozen=True)
class Decode:
    """Bytes that one decode step of all rows reads.

    Attributes:
        batch: rows, each of which gets a token in a step.
        weights: of the model, of routed experts the share that is expected to be asked for; None where not known.
        cache: keys, values and states, once per layer of the model that reads them.
        outside: part of `cache` that comes from outside of the device first.
    """

    batch: int
    weights: int | None
    cache: int
    outside: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes of a step."""
        return (self.weights or 0) + self.cache

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a step per token that it makes."""
        return self.step_bytes / self.batch

    def tokens_per_second(self, bandwidth: int, host_bandwidth: int | None = None) -> float:
        """Return the tokens per second over all rows, at most.

        Args:
            bandwidth: of the device's memory, bytes per second.
            host_bandwidth: of the way from outside to the device; None leaves that way out.
        """
        seconds = self.step_bytes / bandwidth
        if host_bandwidth is not None:
            seconds = max(seconds, self.outside / host_bandwidth)
        return self.batch / seconds if seconds else float("inf")


def expected_experts(experts: int, per_token: int, batch: int) -> float:
    """Return the share of a layer's routed experts that at least one of `batch` tokens is expected to take.

    1 - (1 - per_token / experts) ** batch: tokens choose independently, and all experts are equally likely.
    """
    return 1 - (1 - per_token / experts) ** batch if experts else 1.0


def weights_read(inventory: Inventory, batch: int, weights: int | None) -> int | None:
    """Return the bytes of `weights` bytes of weights that a step of `batch` tokens reads."""
    if weights is None or not inventory.expert_parameters or not inventory.parameters:
        return weights
    share = expected_experts(inventory.experts, inventory.experts_per_token, batch)
    of_experts = weights * inventory.expert_parameters / inventory.parameters
    return round(weights - of_experts * (1 - share))


def cache_read(
    choice: Choice, inventory: Inventory, report: MemoryReport, *, batch: int, context: int
) -> tuple[int, int]:
    """Return the bytes of a cache that a step reads, and how many of them lie outside of the device.

    A layer with a window reads the tokens in it. Sealed tokens are read as stored, with their scales; the others exact.
    Of a static cache transformers reads all columns, those too that hold no token yet. Where steps read a part of the pages, a
    choice reads of every page what page_summary.part_fields lists, which lies on the device, and attention the pages that it
    takes, at most.

    Args:
        report: of the cache, for the part of its pages that lies outside.
    """
    dtype, options = inventory.torch_dtype, choice.options
    specs = {}
    if options is not None:
        groups = page_groups(inventory, layer_formats(inventory, options), dtype, ROWS)
        specs = {index: spec for group in groups.values() for index, spec in group.items()}
    columns = context if choice.length is None else choice.length
    stored = chosen_by = exact = 0.0
    budget = None if options is None else read_budget(options)
    for index, layer in enumerate(inventory.layers):
        tokens = columns if layer.window is None else min(columns, layer.window)
        plain = tokens
        if options is not None and index in specs:
            sizes, spec = row_sizes(options, layer.window), specs[index]
            plain, pages = min(tokens, sizes.exact(context)), sizes.sealed(context)
            sealed = float(tokens - plain)
            if budget is not None and layer.window is None and budget.chooses(pages, context):
                sealed = budget.most(pages) * options.page_size
                chosen_by += layer.readers * pages * part_bytes(spec.keys)
            stored += layer.readers * sealed * spec.page_bytes / options.page_size
        exact += layer.readers * plain * layer.elements * dtype.itemsize
        positions = index_bytes(layer, dtype) - layer.index_bytes(dtype)  # these grow in any cache
        index = columns * layer.index_bytes(dtype) + context * positions
        exact += layer.readers * index + state_bytes(layer, 1, dtype)
    held = report.payload + report.scales + report.offloaded
    outside = stored * report.offloaded / held if held else 0.0
    return round((stored + chosen_by + exact) * batch), round(outside * batch)
