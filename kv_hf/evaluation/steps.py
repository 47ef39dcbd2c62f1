"""Decode steps of a model with one cache, what they take in time and memory, and times of several contenders in turns.

Machines drift (clocks, neighbours, caches), so that two runs of minutes apart cannot be compared. Here every
round calls every contender once; what disturbs a round disturbs all of them, and the median drops the round.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..cache.model_shape import decoder_config, latent_rank, page_sizes
from ..cache.paged_cache import PagedCache
from ..pages.host_heap import trim_heap
from .caches import CacheKind, held_bytes

WARMUP = 2  # steps that are not timed
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Spread:
    """Median and spread of n samples; the unit is that of the samples."""

    p50: float
    p20: float
    p80: float
    mean: float
    max: float
    n: int

    def row(self, prefix: str) -> dict[str, float]:
        """Return the fields as `prefix_p50` and so on, as rows of results/ have them."""
        return {f"{prefix}_{name}": value for name, value in asdict(self).items()}


def quantile(samples: Sequence[float], part: float) -> float:
    """Return the `part` quantile (0 to 1), linear between neighbouring samples. Raises ValueError without samples."""
    if not samples:
        raise ValueError("a quantile needs at least one sample, got none")
    return torch.tensor(samples, dtype=torch.float64).quantile(part).item()


def spread(samples: Sequence[float]) -> Spread:
    """Summarise samples."""
    middle, low, high = (quantile(samples, part) for part in (0.5, 0.2, 0.8))
    count = len(samples)
    return Spread(middle, low, high, mean=sum(samples) / count, max=max(samples), n=count)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call: wall time on a CPU, CUDA events on a GPU.

    The events lie in the stream before and behind the call, so that the time holds the launches that the GPU
    had to wait for, as a user's decode step does.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    *,
    warmup: int = WARMUP,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Call every contender once per round and return the milliseconds of each, warm-up rounds left out.

    Odd rounds go backwards, so that no contender always follows the same neighbour.

    Args:
        before: called with the name ahead of each call, outside of the time.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            before(name)
            took = timed(contenders[name], device)
            if number >= 0:
                times[name].append(took)
    return times


class Meter:
    """The growth of memory since a moment, and its peak: on CUDA what torch's allocator has given, else resident memory.

    It is made when everything else is in place: freed blocks are given back first, so that growth is new memory. From then
    on nothing is: what an allocator keeps counts as taken. Figures are None where the system does not tell them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, "allocated" if device.type == "cuda" else "resident"
        gc.collect()
        if self.name == "allocated":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        self.base = self._now("VmRSS", trim=True)
        self.restart()

    def restart(self) -> None:
        """Let the peak begin at what is taken now."""
        self._peaks = True
        try:
            if self.name == "allocated":
                torch.cuda.reset_peak_memory_stats(self.device)
            else:
                CLEAR.write_text("5")
        except OSError:  # a sandbox may forbid it; the peak since the start of the process would be another figure
            self._peaks = False

    def grown(self) -> int | None:
        """Return the bytes taken since the meter was made."""
        now = self._now("VmRSS")
        return None if now is None or self.base is None else now - self.base

    def peak(self) -> int | None:
        """Return the most bytes taken on top of the start, since `restart`."""
        most = self._now("VmHWM") if self._peaks else None
        return None if most is None or self.base is None else most - self.base

    def _now(self, field: str, trim: bool = False) -> int | None:
        """Return bytes, as /proc calls them: VmRSS (now), VmHWM (most)."""
        if self.name == "allocated":
            most = field == "VmHWM"
            tell = torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated
            return tell(self.device)
        if trim:  # what glibc holds although it is free
            trim_heap()
        lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), None)


def fill_random(cache: Any, model: Any, batch: int, tokens: int, seed: int = 0) -> None:
    """Put `tokens` random keys and values into every layer, the same for every cache of the same sizes.

    A prefill of a long prompt takes minutes on a CPU, and what a step costs does not depend on the numbers.

    Raises: ValueError for a model whose layers differ in their sizes.
    """
    config = decoder_config(model.config)
    sizes = page_sizes(config)
    if sizes is None:
        raise ValueError(f"the config of {config.model_type} states no single size of a head")
    heads = 1 if latent_rank(config) is not None else config.num_key_value_heads
    like = {"device": model.device, "dtype": model.dtype}
    numbers = torch.Generator(model.device).manual_seed(seed)
    for index in range(config.num_hidden_layers):
        states = [
            torch.randn((batch, heads, tokens, sizes[side]), generator=numbers, **like)
            for side in ("key_dim", "value_dim")
        ]
        cache.update(*states, index)


def kernel_of(cache: Any) -> str | None:
    """Return the name of the kernel that a paged cache's attention runs on, None for other caches."""
    if not isinstance(cache, PagedCache):
        return None
    store = cache.paged_layers[0].store
    store = getattr(store, "base", store)  # a preallocated store wraps the plain one
    return None if store is None else store.kernel.name


def random_prompt(vocab: int, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return random token ids [batch, tokens], the same on every device."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab, (batch, tokens), generator=numbers).to(device)


class Decoding:
    """A model that decodes greedily with one cache.

    Args:
        prompt: [batch, tokens], int64; its last token is the first that a step takes.
        fill: "prompt" for a real prefill, "random" for random keys and values in its place.
        room: steps that will be taken, for caches that must know.

    Attributes:
        prefill_ms: of a real prefill, None of a random one.
        token: [batch, 1], what the next step takes.
        transient_bytes: see `note_peak`.
    """

    def __init__(
        self,
        model: Any,
        kind: CacheKind,
        prompt: torch.Tensor,
        fill: str = "prompt",
        room: int = 64,
    ) -> None:
        self.model, self.kind, self.device = model, kind, prompt.device
        self.token = prompt[:, -1:]
        self.prefill_ms: float | None = None
        self.transient_bytes: int | None = None
        self.before()
        self.cache = kind.make(model.config, prompt.shape[1] + room + 8)
        if fill == "random":
            fill_random(self.cache, model, *prompt.shape)
        else:
            self.prefill_ms = timed(lambda: self._forward(prompt), self.device)

    def before(self) -> None:
        """Give the model the attention that this cache is used with; not part of a step's time."""
        now = self.model.config.get_text_config(decoder=True)._attn_implementation
        if now != self.kind.attention:
            self.model.set_attn_implementation(self.kind.attention)

    def step(self) -> torch.Tensor:
        """Decode one token; return the logits [batch, vocab]."""
        logits = self._forward(self.token)
        self.token = logits.argmax(-1, keepdim=True)
        return logits

    def note_peak(self) -> None:
        """Take a step and note the memory that it took at most: `transient_bytes`, None where the system does not tell."""
        self.before()
        meter = Meter(self.device)
        self.step()
        self.transient_bytes = meter.peak()

    @property
    def tokens(self) -> int:
        """Columns that the cache holds."""
        return int(self.cache.get_seq_length())

    @property
    def kv_bytes(self) -> int:
        """Bytes that the cache holds."""
        return held_bytes(self.cache)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]
