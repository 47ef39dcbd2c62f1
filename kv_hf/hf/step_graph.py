"""Decode steps of generate() as one CUDA graph: the first is run, captured and compared, the others are replayed.

On a GPU a step of one token is bound by the host: Python and the launches of some ten kernels per layer. A graph of
the step is launched at once. The cache has to be preallocated, so that nothing moves and all lengths are on the device.
"""

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..bridge.masks import LazyMask
from ..cache.model_shape import CACHE
from ..cache.paged_cache import PagedCache
from ..errors import first_line
from ..notices import say_once, warn_once
from ..pages.step import FixedStep

# of the largest logit: how far the replay may lie from the same step run without a graph, which runs the same kernels
TOLERANCE = 2e-2


_ready = threading.local()


def want_graphs(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap GenerationMixin._valid_auto_compile_criteria: caches whose steps are captured want another call than the model's."""

    @functools.wraps(original)
    def criteria(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, PagedCache) and cache._compiled and cache._compiled.captured:
            _ready.graph = StepGraph(self, cache)
            return True
        _ready.graph = None
        return original(self, model_kwargs, generation_config)

    return criteria


def call_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap PreTrainedModel.get_compiled_call, which generate() calls next where the criteria say so."""

    @functools.wraps(original)
    def compiled_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph, _ready.graph = getattr(_ready, "graph", None), None
        if graph is not None and graph.model is self:
            return graph
        return original(self, *args, **kwargs)

    return compiled_call


class StepGraph:
    """Calls a model; steps of one token on `cache` become replays of a graph as soon as they can.

    The result of the first replay is compared with that of the same step run by Python. Where they differ, and where
    the step cannot be captured, Python runs this step and all that follow, and a warning says why, once.

    Args:
        model: what generate() would call.
        cache: the one that this generation fills.
    Attributes:
        given_up: why Python runs all steps from now on; None while nothing speaks against a graph.
    """

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self.model = model
        self.cache = cache
        self.given_up: str | None = None
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Any] = []
        self._structure: Any = None
        self._outputs: Any = None
        self._fixed: dict[Any, FixedStep] = {}
        self._windows: list[tuple[Any, torch.Tensor]] = []
        self._pages: list[Any] = []

    def __call__(self, **inputs: Any) -> Any:
        """Return what the model returns for `inputs`; its tensors are the caller's."""
        if self.given_up is not None or not self._is_step(inputs):
            return self.model(**inputs)
        given = {name: value for name, value in inputs.items() if name != CACHE}
        leaves, structure = pytree.tree_flatten(given)
        if self._replay is not None and not self._takes(leaves, structure):
            return self.model(**inputs)
        cache = self.cache
        rows = len(cache._group)
        cache.forward.begin(rows, 1)  # the model joins this step, or a replay does it
        sealing = [layer.store for layer in cache.paged_layers if layer.group.step.seal is not None]
        looks = any(store and store.looks for store in sealing)
        if looks or not all(FixedStep.takes(group.step) for group in cache.groups):
            return self.model(**inputs)
        with cache.page_memory.lock:  # copies of this cache may make storage grow in other threads
            if self._replay is None or not self._stays():
                return self._record(inputs, leaves, structure)
            for held, given in zip(self._inputs, leaves, strict=True):
                memory = held._made if type(held) is LazyMask else held
                if isinstance(memory, torch.Tensor):
                    memory.copy_(given)
            self._run()
        return self._result()

    def _is_step(self, inputs: dict[str, Any]) -> bool:
        """Say whether `inputs` are one token per row for a cache that holds some."""
        if inputs.get(CACHE) is not self.cache or self.cache._tokens_on is None:
            return False
        tokens = inputs.get("input_ids")
        return isinstance(tokens, torch.Tensor) and tokens.shape[-1] == 1

    def _run(self) -> None:
        """Replay the step that was begun, and note that all layers took part."""
        assert self._replay is not None
        forward = self.cache.forward
        forward.changing = True
        for group, fixed in self._fixed.items():
            fixed.write(group.step)
        for window, tokens in self._windows:
            if window.tokens is not tokens:  # a step that Python ran has moved it
                tokens.copy_(window.tokens)
                window.tokens = tokens
        self._replay()
        for layer in self.cache.paged_layers:
            layer.revision += 1
            layer.take_part(layer.group.step)

    def _stays(self) -> bool:
        """Say whether all lies where the graph reads it: pages may be wider, or have grown for those of the cache's copies."""
        return all(map(operator.is_, self._pages, self._places()))

    def _places(self) -> list[Any]:
        """Return what holds windows and pages, layer by layer: another object once they are others."""
        stores = [layer.store for layer in self.cache.paged_layers if layer.store]
        return [*stores, *(side.fields for store in stores for side in store.pages.sides)]

    def _record(self, inputs: dict[str, Any], leaves: list[Any], structure: Any) -> Any:
        """Run the step that was begun as it will be recorded, record it, replay it at the same place, and compare."""
        cache = self.cache
        steps = {group: group.step for group in cache.groups}
        self._inputs = [_own(leaf) for leaf in leaves]
        self._structure = structure
        own = {**pytree.tree_unflatten(self._inputs, structure), CACHE: cache}
        layers = cache.paged_layers
        most = cache.options.max_length
        assert most is not None
        self._fixed = {
            group: FixedStep(len(group), group.reserve, most, layers[0].device)
            for group in cache.groups
        }
        standing = {group: fixed.standing_for(steps[group]) for group, fixed in self._fixed.items()}
        for group, fixed in self._fixed.items():
            fixed.write(steps[group])
        cache._compiled.fixed = self._fixed
        try:
            self._rewind(standing)
            expected = on_side_stream(lambda: self.model(**own))  # Triton compiles
            self._windows = [(one, one.tokens) for layer in layers for one in layer.residuals or ()]
            self._pages = self._places()
            self._rewind(standing)
            self._replay, outputs = capture(lambda: self.model(**own))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            self._give_up(f"it cannot be captured ({first_line(error)})")
        finally:
            cache._compiled.fixed = None
        self._rewind(steps)  # captured, not run
        if self.given_up is not None:
            return self.model(**inputs)
        self._run()
        self._outputs = outputs
        if not _agree(expected, outputs):
            self._give_up("its replay gave other logits than Python")
            return expected
        say_once(
            f"graph of {type(self.model).__name__}",
            f"kv_hf: decode steps of {type(self.model).__name__} run as one CUDA graph (cache_config={{'cuda_graph': 'never'}} "
            "or disable_compile=True turns that off)",
        )
        return self._result()

    def _rewind(self, steps: dict[Any, Any]) -> None:
        """Let all layers stand before these steps; what a step of one token writes it may write again."""
        forward = self.cache.forward
        for group, step in steps.items():
            group.step = step
        for layer in self.cache.paged_layers:
            layer.revision += 1
            layer.seen = layer.group.step.seen_before
        forward.joined = 0
        forward.changing = False

    def _takes(self, leaves: list[Any], structure: Any) -> bool:
        """Say whether the captured step is the one for such inputs."""
        return structure == self._structure and all(map(_alike, self._inputs, leaves))

    def _result(self) -> Any:
        """Return the outputs, in tensors that the next replay leaves alone."""
        given = {name: value for name, value in self._outputs.items() if name != CACHE}
        own = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        if CACHE in self._outputs:
            own[CACHE] = self.cache
        return type(self._outputs)(**own)

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        self._replay, self._inputs, self._outputs = None, [], None
        own = type(self.model).__name__
        warn_once(
            f"no graph of {own}: {reason}",
            f"Decode steps of {own} are launched by Python, kernel by kernel, and not as one CUDA graph: {reason}. "
            "cache_config={'cuda_graph': 'never'} does not try",
        )


def _own(leaf: Any) -> Any:
    """Return an input in memory of its own; what stands for a mask stays that, and is built once the model computes with it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # each row of its own: an expanded mask could not be written to
    make = functools.partial(leaf.clone, memory_format=torch.contiguous_format)
    if type(leaf) is LazyMask and not leaf.read:
        return LazyMask(tuple(leaf.shape), leaf.device, make, leaf.causal)
    return make()


def _alike(held: Any, given: Any) -> bool:
    """Say whether `given` may be copied into `held`, or is the same constant."""
    if not isinstance(held, torch.Tensor) or not isinstance(given, torch.Tensor):
        return held is given or (type(held) is type(given) and bool(held == given))
    if type(held) is LazyMask and getattr(given, "read", True):  # this one hides more
        return False
    return (held.shape, held.dtype, held.device) == (given.shape, given.dtype, given.device)


def _agree(expected: Any, found: Any) -> bool:
    """Compare logits; waits for the device."""
    wanted, got = expected["logits"].float(), found["logits"].float()
    # -inf hides a part of the vocabulary
    bound = TOLERANCE * wanted.nan_to_num(0, 0, 0).abs().max()
    same = (got == wanted) | ((got - wanted).abs() <= bound) | (got.isnan() & wanted.isnan())
    return bool(same.all())


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
