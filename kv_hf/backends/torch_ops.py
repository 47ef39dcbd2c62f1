"""The backends as operators of torch, `torch.ops.kv_hf.*`, which torch.compile takes as they are.

Operators take tensors, numbers and strings: specs and backends go by their names. Computes nothing itself: each
operator calls the backend that it is told to.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.library import Library, register_fake

from ..read_budget import ReadBudget
from ..spec import PageSpec
from .base import AttentionCall, Backend
from .inputs import SHARED, PagedKV
from .reference.pairs import Fields, Pair
from .registry import chooser, load

_LIBRARY = Library("kv_hf", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor key_codes, Tensor? key_scale, Tensor? key_offset, Tensor? key_order, "
    "Tensor value_codes, Tensor? value_scale, Tensor? value_offset, Tensor? value_order, Tensor block_table, "
    "Tensor num_pages, Tensor residual_keys, Tensor residual_values, Tensor exact_lens, Tensor padding, int seen, "
    "int sink_tokens, float softmax_scale, "
    "Tensor? mask, float? softcap, Tensor? sink_logits, int? sliding_window, str spec, str backend) -> Tensor"
)
_LIBRARY.define(
    "choose_pages(Tensor query, Tensor key_codes, Tensor? key_scale, Tensor? key_offset, Tensor? key_order, "
    "Tensor value_codes, Tensor block_table, Tensor num_pages, Tensor residual_keys, Tensor residual_values, "
    "Tensor exact_lens, int seen, int sink_tokens, float softmax_scale, float? softcap, Tensor? sink_logits, "
    "int? read_pages, float? read_share, float? read_top_p, int read_from, str spec, str backend) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "write_pair(Tensor(a!) residual_keys, Tensor(b!) residual_values, Tensor new_keys, Tensor new_values, Tensor starts, "
    "Tensor skips, Tensor jobs, Tensor(c!) key_codes, Tensor(d!)? key_scale, Tensor(e!)? key_offset, "
    "Tensor(f!)? key_order, Tensor(g!) value_codes, Tensor(h!)? value_scale, Tensor(i!)? value_offset, "
    "Tensor(j!)? value_order, Tensor(k!) damaged, str spec, str backend) -> ()"
)

_specs: dict[str, PageSpec] = {}  # by what they print; formats may share a name one after the other
_launches: dict[tuple[str, str], dict[Any, Any]] = {}  # (spec, backend) -> what the backend keeps


def traceable(backend: Backend, spec: str) -> Backend:
    """Return `backend` with functions that torch.compile takes whole: `attend` and `choose_pages`; tokens are written by `write_pair`.

    Args:
        spec: name of the pages' spec, by `spec_name`.
    """
    return replace(
        backend,
        attend=partial(attend, backend.name, spec),
        choose_pages=partial(choose_pages, backend.name, spec),
    )


def spec_name(spec: PageSpec) -> str:
    """Return the name under which operators know `spec`; to be asked before a forward is traced."""
    name = repr(spec)
    # another format may have been registered under the name of one that is gone, whose caches live on
    while _specs.setdefault(name, spec) != spec:
        name += "'"
    return name


def attend(backend: str, spec: str, call: AttentionCall) -> torch.Tensor:
    """Attend as the backend of that name does, through one operator.

    Args:
        spec: name of the pages' spec, by `spec_name`.
    Returns: [rows, num_heads, q_len, out_dim] in the query's dtype, a view of [rows, q_len, num_heads, out_dim].
    """
    kv = call.kv
    out: torch.Tensor = torch.ops.kv_hf.attend(
        call.query, *_tensors(kv.key_pages), *_tensors(kv.value_pages), kv.block_table, kv.num_pages, kv.residual_keys,
        kv.residual_values, kv.exact_lens, kv.padding, kv.seen, kv.sink_tokens, call.softmax_scale, call.mask,
        call.softcap, call.sink_logits, call.sliding_window, spec, backend,
    )  # fmt: skip
    return out.transpose(1, 2)


def choose_pages(backend: str, spec: str, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose pages as the backend of that name does, through one operator.

    Args:
        spec: name of the pages' spec, by `spec_name`.
        call: with a budget; see reference.selection.choose_pages.
    Returns: block table [rows, width] and pages of each row [rows], int32.
    """
    kv, budget = call.kv, call.kv.budget
    assert budget is not None
    table, num_pages = torch.ops.kv_hf.choose_pages(
        call.query, *_tensors(kv.key_pages), kv.value_pages["codes"], kv.block_table, kv.num_pages, kv.residual_keys,
        kv.residual_values, kv.exact_lens, kv.seen, kv.sink_tokens, call.softmax_scale, call.softcap, call.sink_logits,
        budget.pages, budget.share, budget.top_p, budget.from_tokens, spec, backend,
    )  # fmt: skip
    return table, num_pages


def write_pair(
    backend: str,
    spec: str,
    windows: Pair,
    new: Pair,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor,
    fields: tuple[Fields, Fields],
    damaged: torch.Tensor,
) -> None:
    """Append to both windows and seal pages from them as reference.pairs.write_pair does, through one operator.

    Args:
        backend: name of the backend; spec: name of the pages' spec, by `spec_name`.
        windows: keys and values, [rows, num_kv_heads, slots, head_dim], written in place.
        new: their new tokens, [rows, num_kv_heads, q_len, head_dim].
        starts, skips: [rows], int32: first free slot, and leading new tokens that are left out.
        jobs: [n, 3], int32: (row, first slot, page id); a job with a negative page id is skipped.
        fields: tensors of both sides' pages, written in place.
        damaged: uint8 scalar, set to 1 where numbers had to be made finite.
    """
    keys, values = fields
    torch.ops.kv_hf.write_pair(
        *windows,
        *new,
        starts,
        skips,
        jobs,
        *_tensors(keys),
        *_tensors(values),
        damaged,
        spec,
        backend,
    )


_NAMES = ("codes", "scale", "offset", "order")  # of the tensors of a side, in the schemas' order


def _tensors(fields: Fields) -> tuple[torch.Tensor | None, ...]:
    return tuple(fields.get(name) for name in _NAMES)


def _fields(tensors: tuple[torch.Tensor | None, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors of SideSpec.fields that are there, by name."""
    found = zip(_NAMES, tensors, strict=True)
    return {name: tensor for name, tensor in found if tensor is not None}


def _kept(backend: str, spec: str) -> dict[Any, Any]:
    """Return what a backend keeps between calls: nothing, where that would refer to tensors of one cache."""
    if load(backend).keeps_tensors:
        return {}
    return _launches.setdefault((spec, backend), {SHARED: None})


# -- the operators ---------------------------------------------------------------------------------------------------


def _attend(query: torch.Tensor, *given: Any) -> torch.Tensor:
    """Put together what the schema of `attend` takes apart; returns a contiguous [rows, q_len, num_heads, out_dim]."""
    pages, (table, num_pages, keys, values, exact_lens, padding) = given[:8], given[8:14]
    seen, sink_tokens, *options, name, backend = given[14:]
    kv = PagedKV(
        _fields(pages[:4]), _fields(pages[4:]), _specs[name], table, num_pages, keys, values, exact_lens, padding,
        seen, sink_tokens, launches=_kept(backend, name),
    )  # fmt: skip
    out = load(backend).attend(AttentionCall(query, kv, *options))
    # the strides that the fake below promises, which are those of the compiled kernels: no copy there
    return out.transpose(1, 2).contiguous()


def _choose_pages(query: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Put together what the schema of `choose_pages` takes apart."""
    table, num_pages, keys, values, exact_lens, seen, sink_tokens = given[5:12]
    softmax_scale, softcap, sink_logits, *budget, name, backend = given[12:]
    kv = PagedKV(
        _fields(given[:4]), {"codes": given[4]}, _specs[name], table, num_pages, keys, values, exact_lens,
        torch.zeros_like(exact_lens), seen, sink_tokens, launches=_kept(backend, name), budget=ReadBudget(*budget),
    )  # fmt: skip
    call = AttentionCall(query, kv, softmax_scale, None, softcap, sink_logits)
    return chooser(load(backend))(call)


def _write_pair(*given: Any) -> None:
    """Put together what the schema of `write_pair` takes apart."""
    windows, new, starts, skips, jobs = given[:2], given[2:4], given[4], given[5], given[6]
    fields = _fields(given[7:11]), _fields(given[11:15])
    damaged, spec, backend = given[15:]
    launches = _launches.setdefault((spec, backend), {SHARED: None})
    load(backend).write_pair(
        windows, new, starts, skips, jobs, fields, _specs[spec], damaged, launches
    )


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attend", _attend, _device)
    _LIBRARY.impl("choose_pages", _choose_pages, _device)
    _LIBRARY.impl("write_pair", _write_pair, _device)


@register_fake("kv_hf::attend", lib=_LIBRARY)
def _fake_attend(query, *given):  # type: ignore[no-untyped-def]
    rows, num_heads, q_len, _ = query.shape
    return query.new_empty(rows, q_len, num_heads, _specs[given[-2]].out_dim)


@register_fake("kv_hf::choose_pages", lib=_LIBRARY)
def _fake_choose_pages(query, *given):  # type: ignore[no-untyped-def]
    budget, table = ReadBudget(*given[15:19]), given[5]
    width = budget.width(table.shape[1], _specs[given[-2]].keys.page_size)
    return table.new_empty(table.shape[0], width), table.new_empty(table.shape[0])


@register_fake("kv_hf::write_pair", lib=_LIBRARY)
def _fake_write_pair(*given):  # type: ignore[no-untyped-def]
    return None
