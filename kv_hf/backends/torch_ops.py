"""The CPU implementations as operators of torch, `torch.ops.kv_hf.cpu_*`, which torch.compile takes as they are.

Operators take tensors, numbers and strings; the specs are rebuilt from the tensors' shapes. Triton's own operators
are in triton/torch_ops.py. Computes nothing itself: each operator calls the implementation that it is told to.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.library import Library, register_fake

from ..spec import PageSpec
from .inputs import PagedKV
from .pairs import Fields, Pair
from .registry import Kernel, load
from .stored import stored_fields, stored_side

_LIBRARY = Library("kv_hf", "FRAGMENT")
_LIBRARY.define(
    "cpu_attend(Tensor query, Tensor key_codes, Tensor? key_scale, Tensor? key_offset, Tensor value_codes, "
    "Tensor? value_scale, Tensor? value_offset, Tensor block_table, Tensor num_pages, Tensor window_keys, "
    "Tensor window_values, Tensor exact_lens, Tensor padding, Tensor? mask, Tensor? sink_logits, "
    "float softmax_scale, float? softcap, int? sliding_window, int seen, int sink_tokens, int page_size, "
    "str key_code, int key_bits, str value_code, int value_bits, str layout, str kernel) -> Tensor"
)
_LIBRARY.define(
    "write_pair(Tensor(a!) window_keys, Tensor(b!) window_values, Tensor new_keys, Tensor new_values, Tensor starts, "
    "Tensor skips, Tensor jobs, Tensor(c!) key_codes, Tensor(d!)? key_scale, Tensor(e!)? key_offset, "
    "Tensor(f!) value_codes, Tensor(g!)? value_scale, Tensor(h!)? value_offset, Tensor(i!) damaged, str spec, "
    "str kernel) -> ()"
)

_specs: dict[str, PageSpec] = {}  # by what they print, which says everything about them
_launches: dict[tuple[str, str], dict[Any, Any]] = {}  # (spec, kernel) -> what the backend keeps


def traceable(kernel: Kernel) -> Kernel:
    """Return `kernel` with an `attend` that torch.compile takes whole; tokens are written by `write_pair`."""
    if kernel.name != "triton":
        return replace(kernel, attend=partial(_attend, kernel.name))
    from .triton import torch_ops

    return replace(kernel, attend=torch_ops.paged_attention)


def spec_name(spec: PageSpec) -> str:
    """Return the name under which operators know `spec`; to be asked before a forward is traced."""
    name = repr(spec)
    # not setdefault: another format may have been registered under the name of one that is gone
    if _specs.get(name) != spec:
        _specs[name] = spec
    return name


def write_pair(
    kernel: str,
    name: str,
    windows: Pair,
    new: Pair,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor,
    fields: tuple[Fields, Fields],
    damaged: torch.Tensor,
) -> None:
    """Append to both windows and seal pages from them as pairs.write_pair does, through one operator.

    Args:
        kernel: name of the implementation; name: of the spec, by `spec_name`.
    """
    keys, values = fields
    torch.ops.kv_hf.write_pair(
        *windows, *new, starts, skips, jobs, keys["codes"], keys.get("scale"), keys.get("offset"),
        values["codes"], values.get("scale"), values.get("offset"), damaged, name, kernel,
    )  # fmt: skip


# -- what a traced forward calls --------------------------------------------------------------------------------------


def _attend(
    kernel: str,
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    keys, values = kv.key_pages, kv.value_pages
    key_scheme, value_scheme = kv.spec.keys.scheme, kv.spec.values.scheme
    out: torch.Tensor = torch.ops.kv_hf.cpu_attend(
        query, keys["codes"], keys.get("scale"), keys.get("offset"),
        values["codes"], values.get("scale"), values.get("offset"),
        kv.block_table, kv.num_pages, kv.window_keys, kv.window_values, kv.exact_lens, kv.padding,
        mask, sink_logits, softmax_scale, softcap, sliding_window, kv.seen, kv.sink_tokens, kv.page_size,
        key_scheme.code, key_scheme.bits, value_scheme.code, value_scheme.bits, kv.spec.keys.layout, kernel,
    )  # fmt: skip
    return out.transpose(1, 2)


# -- the operators ---------------------------------------------------------------------------------------------------


def _cpu_attend(
    query: torch.Tensor,
    key_codes: torch.Tensor,
    key_scale: torch.Tensor | None,
    key_offset: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_scale: torch.Tensor | None,
    value_offset: torch.Tensor | None,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    exact_lens: torch.Tensor,
    padding: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    softmax_scale: float,
    softcap: float | None,
    sliding_window: int | None,
    seen: int,
    sink_tokens: int,
    page_size: int,
    key_code: str,
    key_bits: int,
    value_code: str,
    value_bits: int,
    layout: str,
    kernel: str,
) -> torch.Tensor:
    keys = stored_fields(key_codes, key_scale, key_offset)
    values = stored_fields(value_codes, value_scale, value_offset)
    spec = PageSpec(
        stored_side("keys", keys, page_size, window_keys, key_code, key_bits, layout=layout),
        stored_side(
            "values", values, page_size, window_values, value_code, value_bits, layout=layout
        ),
    )
    out = load(kernel).attend(
        query,
        PagedKV(
            keys, values, spec, block_table, num_pages, window_keys, window_values, exact_lens,
            padding, seen, sink_tokens,
        ),
        softmax_scale=softmax_scale,
        mask=mask,
        softcap=softcap,
        sink_logits=sink_logits,
        sliding_window=sliding_window,
    )  # fmt: skip
    # the strides that the fake below promises, which are those of the C kernel: no copy there
    return out.transpose(1, 2).contiguous()


def _write_pair(
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor,
    key_codes: torch.Tensor,
    key_scale: torch.Tensor | None,
    key_offset: torch.Tensor | None,
    value_codes: torch.Tensor,
    value_scale: torch.Tensor | None,
    value_offset: torch.Tensor | None,
    damaged: torch.Tensor,
    spec: str,
    kernel: str,
) -> None:
    fields = (
        stored_fields(key_codes, key_scale, key_offset),
        stored_fields(value_codes, value_scale, value_offset),
    )
    load(kernel).write_pair(
        (window_keys, window_values), (new_keys, new_values), starts, skips, jobs, fields, _specs[spec], damaged,
        _launches.setdefault((spec, kernel), {}),
    )  # fmt: skip


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("write_pair", _write_pair, _device)
_LIBRARY.impl("cpu_attend", _cpu_attend, "CPU")


@register_fake("kv_hf::cpu_attend", lib=_LIBRARY)
def _fake_attend(query, key_codes, *others):  # type: ignore[no-untyped-def]
    rows, num_heads, q_len, _ = query.shape
    window_values = others[8]
    return query.new_empty(rows, q_len, num_heads, window_values.shape[-1])


@register_fake("kv_hf::write_pair", lib=_LIBRARY)
def _fake_write_pair(*tensors_and_names):  # type: ignore[no-untyped-def]
    return None
