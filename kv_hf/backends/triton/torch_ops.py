"""The kernels as operators of torch, `torch.ops.kv_hf.*`, which torch.compile and CUDA graphs take as they are.

Operators take tensors, numbers and strings; the specs are rebuilt from the tensors' shapes. Importing this module
registers them (once per process) and imports triton.
"""

from typing import Any

import torch
from torch.library import Library, register_fake

from ...errors import CacheOptionError
from ...spec import PageSpec, SideSpec
from ..inputs import PagedKV
from ..stored import stored_fields, stored_side
from . import launch, write
from .tuning import Launch

_LIBRARY = Library("kv_hf", "FRAGMENT")
_LIBRARY.define(
    "paged_decode(Tensor query, Tensor key_codes, Tensor? key_scale, Tensor? key_offset, Tensor value_codes, "
    "Tensor? value_scale, Tensor? value_offset, Tensor block_table, Tensor num_pages, Tensor window_keys, "
    "Tensor window_values, Tensor exact_lens, Tensor padding, Tensor? mask, Tensor? sink_logits, "
    "float softmax_scale, float? softcap, int? sliding_window, int sink_tokens, int page_size, str key_code, "
    "int key_bits, str value_code, int value_bits, int[]? launch=None) -> Tensor"
)
_LIBRARY.define(
    "latent_decode(Tensor query, Tensor codes, Tensor? scale, Tensor? offset, Tensor rope_codes, "
    "Tensor? rope_scale, Tensor? rope_offset, Tensor block_table, Tensor num_pages, Tensor window, "
    "Tensor window_rope, Tensor exact_lens, Tensor padding, Tensor? mask, Tensor? sink_logits, "
    "float softmax_scale, int? sliding_window, int sink_tokens, int page_size, str code, int bits, "
    "str rope_code, int rope_bits, int[]? launch=None) -> Tensor"
)
_LIBRARY.define(
    "seal_pages(Tensor tokens, Tensor jobs, Tensor(a!) codes, Tensor(b!)? scale, Tensor(c!)? offset, str side, "
    "int page_size, str code, int bits, float clip) -> Tensor"
)
_LIBRARY.define("append_tokens(Tensor(a!) window, Tensor new, Tensor starts, Tensor skips) -> ()")


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, through one operator.

    Args:
        launch: warps, stages and splits, or None for those of `tuning.launch_parameters`.
    """
    keys, values = kv.key_pages, kv.value_pages
    key_scheme, value_scheme = (side.scheme for side in kv.spec.sides)
    parameters = None
    if launch is not None:
        parameters = [launch.num_warps, launch.num_stages, launch.num_splits]
    result: torch.Tensor
    if kv.spec.is_latent:
        if softcap is not None:
            raise CacheOptionError(f"softcap: pages of latents are read without one, got {softcap}")
        result = torch.ops.kv_hf.latent_decode(
            query, keys["codes"], keys.get("scale"), keys.get("offset"),
            values["codes"], values.get("scale"), values.get("offset"),
            kv.block_table, kv.num_pages, kv.window_keys, kv.window_values, kv.exact_lens, kv.padding,
            mask, sink_logits, softmax_scale, sliding_window, kv.sink_tokens, kv.page_size,
            key_scheme.code, key_scheme.bits, value_scheme.code, value_scheme.bits, parameters,
        )  # fmt: skip
        return result.transpose(1, 2)
    result = torch.ops.kv_hf.paged_decode(
        query, keys["codes"], keys.get("scale"), keys.get("offset"),
        values["codes"], values.get("scale"), values.get("offset"),
        kv.block_table, kv.num_pages, kv.window_keys, kv.window_values, kv.exact_lens, kv.padding,
        mask, sink_logits, softmax_scale, softcap, sliding_window, kv.sink_tokens, kv.page_size,
        key_scheme.code, key_scheme.bits, value_scheme.code, value_scheme.bits, parameters,
    )  # fmt: skip
    return result.transpose(1, 2)


def seal_pages(
    tokens: torch.Tensor, jobs: torch.Tensor, fields: dict[str, torch.Tensor], spec: SideSpec
) -> torch.Tensor:
    """Encode full pages in place as `reference.seal_pages` does, through one operator."""
    scheme = spec.scheme
    damaged: torch.Tensor = torch.ops.kv_hf.seal_pages(
        tokens, jobs, fields["codes"], fields.get("scale"), fields.get("offset"),
        spec.side, spec.page_size, scheme.code, scheme.bits, scheme.clip,
    )  # fmt: skip
    return damaged


def append_tokens(
    window: torch.Tensor, new: torch.Tensor, starts: torch.Tensor, skips: torch.Tensor
) -> None:
    """Append tokens to windows in place as `write.append_tokens` does, through one operator."""
    torch.ops.kv_hf.append_tokens(window, new, starts, skips)


# -- the operators -------------------------------------------------------------------------------------------------


def _paged_decode(
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
    sink_tokens: int,
    page_size: int,
    key_code: str,
    key_bits: int,
    value_code: str,
    value_bits: int,
    parameters: list[int] | None = None,
) -> torch.Tensor:
    return _attend(
        ("keys", "values"), stored_fields(key_codes, key_scale, key_offset),
        stored_fields(value_codes, value_scale, value_offset), (key_code, key_bits), (value_code, value_bits),
        page_size, (block_table, num_pages, window_keys, window_values, exact_lens, padding), sink_tokens,
        query, mask, sink_logits, softmax_scale, softcap, sliding_window, parameters,
    )  # fmt: skip


def _latent_decode(
    query: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    rope_codes: torch.Tensor,
    rope_scale: torch.Tensor | None,
    rope_offset: torch.Tensor | None,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    window: torch.Tensor,
    window_rope: torch.Tensor,
    exact_lens: torch.Tensor,
    padding: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    softmax_scale: float,
    sliding_window: int | None,
    sink_tokens: int,
    page_size: int,
    code: str,
    bits: int,
    rope_code: str,
    rope_bits: int,
    parameters: list[int] | None = None,
) -> torch.Tensor:
    return _attend(
        ("latent", "k_rope"), stored_fields(codes, scale, offset),
        stored_fields(rope_codes, rope_scale, rope_offset), (code, bits), (rope_code, rope_bits),
        page_size, (block_table, num_pages, window, window_rope, exact_lens, padding), sink_tokens,
        query, mask, sink_logits, softmax_scale, None, sliding_window, parameters,
    )  # fmt: skip


_SPECS: dict[Any, tuple[PageSpec, dict[Any, Any]]] = {}  # and what is kept for all layers of a spec


def _attend(
    names: tuple[str, str],
    keys: dict[str, torch.Tensor],
    values: dict[str, torch.Tensor],
    key_scheme: tuple[str, int],
    value_scheme: tuple[str, int],
    page_size: int,
    tensors: tuple[torch.Tensor, ...],
    sink_tokens: int,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    softmax_scale: float,
    softcap: float | None,
    sliding_window: int | None,
    parameters: list[int] | None,
) -> torch.Tensor:
    """Rebuild what the tensors are and attend; returns [rows, q_len, heads, dim]."""
    windows = tensors[2:4]
    shapes = [(w.shape[1], w.shape[3], w.dtype) for w in windows]
    groups = [tuple((n, t.shape[2:]) for n, t in fields.items()) for fields in (keys, values)]
    key = (names, key_scheme, value_scheme, page_size, *shapes, *groups, query.get_device())
    known = _SPECS.get(key)
    if known is None:
        sides = zip(names, (keys, values), windows, (key_scheme, value_scheme), strict=True)
        spec = PageSpec(*(stored_side(n, f, page_size, w, *scheme) for n, f, w, scheme in sides))
        known = _SPECS[key] = spec, {launch.SHARED: None}
    spec, launches = known
    table, pages, window_keys, window_values, exact_lens, padding = tensors
    kv = PagedKV(
        keys, values, spec, table, pages, window_keys, window_values, exact_lens, padding, 0, sink_tokens,
        launches=launches,
    )  # fmt: skip
    out = launch.paged_attention(
        query,
        kv,
        softmax_scale=softmax_scale,
        mask=mask,
        softcap=softcap,
        sink_logits=sink_logits,
        sliding_window=sliding_window,
        launch=None if parameters is None else Launch(*parameters),
    )
    return out.transpose(1, 2)


def _seal_pages(
    tokens: torch.Tensor,
    jobs: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    side: str,
    page_size: int,
    code: str,
    bits: int,
    clip: float,
) -> torch.Tensor:
    fields = stored_fields(codes, scale, offset)
    return write.seal_pages(
        tokens, jobs, fields, stored_side(side, fields, page_size, tokens, code, bits, clip)
    )


def refuse_cpu(name: str) -> None:
    """Raise CacheOptionError where tensors on the CPU can be no kernel's."""
    if not launch.INTERPRETED:
        raise CacheOptionError(
            f"kv_hf.{name} needs a GPU, and its tensors are on the CPU; use another implementation, or set "
            "TRITON_INTERPRET=1 before Python starts to run it in Triton's interpreter"
        )


def _on_cpu(name: str, function):  # type: ignore[no-untyped-def]
    def refuse(*args, **options):  # type: ignore[no-untyped-def]
        refuse_cpu(name)
        return function(*args, **options)

    return refuse


for _name, _function in {
    "paged_decode": _paged_decode,
    "latent_decode": _latent_decode,
    "seal_pages": _seal_pages,
    "append_tokens": write.append_tokens,
}.items():
    _LIBRARY.impl(_name, _function, "CUDA")
    _LIBRARY.impl(_name, _on_cpu(_name, _function), "CPU")


@register_fake("kv_hf::paged_decode", lib=_LIBRARY)
def _fake_paged_decode(query, key_codes, *others):  # type: ignore[no-untyped-def]
    window_values = others[8]
    rows, heads, q_len, _ = query.shape
    return query.new_empty(rows, q_len, heads, window_values.shape[-1])


@register_fake("kv_hf::latent_decode", lib=_LIBRARY)
def _fake_latent_decode(query, codes, *others):  # type: ignore[no-untyped-def]
    window = others[7]
    rows, heads, q_len, _ = query.shape
    return query.new_empty(rows, q_len, heads, window.shape[-1])


@register_fake("kv_hf::seal_pages", lib=_LIBRARY)
def _fake_seal_pages(tokens, *others):  # type: ignore[no-untyped-def]
    return tokens.new_empty((), dtype=torch.bool)


@register_fake("kv_hf::append_tokens", lib=_LIBRARY)
def _fake_append_tokens(window, new, starts, skips):  # type: ignore[no-untyped-def]
    return None
