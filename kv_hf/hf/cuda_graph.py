"""Record what a function launches on a GPU as one CUDA graph. Knows nothing of models and caches."""

from collections.abc import Callable
from typing import Any

import torch


def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record the launches of `function` on the current GPU, without running them.

    What the function allocates stays allocated for as long as the replay lives, so that its tensors keep their
    addresses. Python code of the function runs once, now: numbers that it computes are the same at every replay.

    Returns: (what runs the launches again, what the function returned).
    Raises: RuntimeError (from torch) where the function waits for the device or does what a graph cannot hold.
    Source: torch.cuda.CUDAGraph.
    """
    graph = torch.cuda.CUDAGraph()
    # other threads may go on using the GPU meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = function()
    return graph.replay, made


def on_side_stream(function: Callable[[], Any]) -> Any:
    """Run `function` on a stream of its own, as work that is captured afterwards should first be run once.

    Libraries make their workspaces at their first call on a stream that is not the default one.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = function()
    torch.cuda.current_stream().wait_stream(stream)
    return made
