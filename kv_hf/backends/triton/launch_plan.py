"""What the shapes of a call to attend decide: the kernel's compile-time arguments, the grid, the partial results.

Made once for a layer and kept in `PagedKV.launches`; knows nothing of tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

from ...spec import PageSpec
from ..base import PagedKV
from .direct import Compiled
from .meta_params import Launch

TYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
ALIGNED = 4  # numbers: maxima begin at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a plan depends on besides the pages: shapes, dtypes and which options are there."""

    rows: int
    heads: int
    q_len: int
    query_dtype: torch.dtype
    mask: str  # "none", "bool" or "float"
    softcap: bool
    sliding_window: bool
    sinks: bool

    @property
    def variant(self) -> dict[str, Any]:
        """Return what the compile-time arguments of every kernel that attends depend on, by name."""
        return {
            "query_dtype": self.query_dtype, "q_len": self.q_len, "mask": self.mask,
            "sliding_window": self.sliding_window, "sinks": self.sinks,
        }  # fmt: skip

    def result(self, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of a result of `dim` channels: heads and tokens change places in memory."""
        token = self.heads * dim
        return (self.rows, self.heads, self.q_len, dim), (self.q_len * token, dim, token, 1)


@dataclass(slots=True, kw_only=True)
class LayerPlan(ABC):
    """What a layer keeps for one kind of call in `PagedKV.launches`.

    Attributes:
        compiled: by which pointers are no multiples of 16; empty in the interpreter.
        counters: zeros for launches captured in a CUDA graph; None: a graph has to make its own.
        workspaces: by stream: addresses of partial results, of their maxima and sums and of counters; and the memory.
    """

    compiled: dict[Any, Compiled] = field(default_factory=dict)
    counters: torch.Tensor | None = None
    workspaces: dict[int, tuple[int, int, int, Any]] = field(default_factory=dict)

    @property
    @abstractmethod
    def groups(self) -> int:
        """Counters."""

    @property
    @abstractmethod
    def partial_results(self) -> int:
        """float32 numbers in front of the maxima and sums."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """float32 numbers of partial results, maxima and sums."""


MOST = 64  # plans of a layer: shapes that change all the time are not remembered forever


def keep(launches: dict[Any, Any], key: Any, plan: LayerPlan) -> None:
    """Keep a plan among what a layer keeps; where these are many, without the other plans."""
    if len(launches) >= MOST:
        for old in [known for known, value in launches.items() if isinstance(value, LayerPlan)]:
            del launches[old]
    launches[key] = plan


@dataclass(slots=True)
class Plan(LayerPlan):
    """How to launch one kind of call.

    Attributes:
        spec: of the pages; keeps what the plan's key names by id.
        kernel: to be compiled with `constants` (by name) and `options`.
        pointers: picks the nine run-time arguments whose alignment the kernel is compiled for.
        rows, blocks: the grid without its splits.
        shape, strides: of the result, [rows, heads, q_len, dim] over a contiguous [rows, q_len, heads, dim].
        columns, dim: of a program's partial result.
        tiles_per_page, min_tiles, max_splits: what `splits` goes by; fixed_splits: what it gives if more than 0.
        combine: (kernel, constants, programs, blocks of channels) that merges the splits, or None where the last
            program does.
        compiled: by which pointers are no multiples of 16, 0: none.
    """

    spec: PageSpec
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    pointers: Callable[[tuple[Any, ...]], tuple[int, ...]]
    rows: int
    blocks: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    columns: int
    dim: int
    tiles_per_page: int
    min_tiles: int
    max_splits: int
    fixed_splits: int = 0
    combine: tuple[Any, dict[str, Any], int, int] | None = None
    combined: Compiled | None = None

    def splits(self, width: int) -> int:
        """Return the programs that share a row's pages, of which there are at most `width`."""
        if self.fixed_splits:
            return self.fixed_splits
        return max(1, min(self.max_splits, width * self.tiles_per_page // self.min_tiles))

    @property
    def groups(self) -> int:
        """Programs of one split; each has a counter."""
        return self.rows * self.blocks

    @property
    def partial_results(self) -> int:
        """float32 numbers of the partial results of as many splits as there may be."""
        splits = self.fixed_splits or self.max_splits
        return -(-self.groups * self.columns * splits * self.dim // ALIGNED) * ALIGNED

    @property
    def numbers(self) -> int:
        """float32 numbers of the partial results with their maxima and sums behind them."""
        splits = self.fixed_splits or self.max_splits
        return self.partial_results + 2 * self.groups * self.columns * splits

    @classmethod
    def of(
        cls, kv: PagedKV, shapes: Shapes, launch: Launch, constants: dict[str, Any], *, blocks: int, tile: int, **others: Any
    ) -> "Plan":  # fmt: skip
        """Return the plan of a call over `kv`.

        Args:
            constants: with dtypes by name.
            tile: tokens of a tile.
            others: fields that each kernel gives: kernel, pointers, columns, min_tiles, max_splits, combine.
        """
        dim = kv.spec.out_dim
        shape, strides = shapes.result(dim)
        return cls(
            spec=kv.spec, constants=triton_constants(constants), rows=shapes.rows, blocks=blocks, shape=shape,
            strides=strides, dim=dim, tiles_per_page=kv.page_size // tile, fixed_splits=launch.num_splits,
            options={"num_warps": launch.num_warps, "enable_fp_fusion": True}, **others,
        )  # fmt: skip


def triton_constants(plain: dict[str, Any]) -> dict[str, Any]:
    """Replace dtype names by Triton's dtypes."""
    return {k: TYPES[v] if k.endswith("_DTYPE") else v for k, v in plain.items()}
