"""Launch the kernels that write: sealing full pages, and appending to windows."""

from typing import Any

import torch

from ...formats.linear import Float8Format, SignedFormat
from ...spec import SideSpec
from . import device
from .append import append_kernel
from .latent_seal import latent_seal_kernel
from .meta_params import power_of_two
from .seal import seal_kernel

TILE_NUMBERS = 4096  # numbers of one tile: what four warps hold without spilling
APPENDED = 16  # new tokens of one program


def seal_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the seal kernel's compile-time arguments."""
    scheme = spec.scheme
    width = spec.head_dim // scheme.codes_per_byte
    wide = min(power_of_two(width), 64)
    scale = scheme.scale_group or (1, 1)
    offset = scheme.offset_group or (0, 0)
    tops = {"none": 0.0, "float8": Float8Format.top, "signed": SignedFormat.top}
    by_channel = scheme.offset_group is not None and scheme.offset_group[1] == 1
    along = offset[0] if by_channel else power_of_two(scale[1])
    across = power_of_two(spec.head_dim) if by_channel else spec.page_size
    return {
        "HEADS": spec.num_kv_heads, "PAGE": spec.page_size, "DIM": spec.head_dim,
        "CODE": scheme.code, "BITS": scheme.bits,
        "TOP": tops.get(scheme.code, float((1 << scheme.bits) - 1)), "CUT": 0.5 * (1.0 - scheme.clip),
        "S_TOKENS": scale[0], "S_CHANNELS": scale[1], "O_TOKENS": offset[0], "O_CHANNELS": offset[1],
        "BY_CHANNEL": by_channel, "TOKEN_CONTIGUOUS": spec.token_contiguous, "WIDTH": width, "WIDE": wide,
        "T_TILE": min(spec.page_size, TILE_NUMBERS // wide // max(1, scheme.codes_per_byte // 2)),
        "R_TILE": min(across, max(1, TILE_NUMBERS // along)),
    }  # fmt: skip


def latent_seal_constants(spec: SideSpec) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel that seals encoded latents."""
    plain = seal_constants(spec)
    per_word = 16 // spec.scheme.bits
    words = spec.page_size // per_word
    wide = min(power_of_two(spec.head_dim), 128)
    return {
        **{name: plain[name] for name in ("PAGE", "CODE", "BITS", "TOP", "CUT", "R_TILE")},
        "RANK": spec.head_dim, "S_TOKENS": plain["S_TOKENS"], "S_CHANNELS": plain["S_CHANNELS"], "WORDS": words, "WIDE": wide,
        "W_TILE": min(words, TILE_NUMBERS // wide // 2),
    }  # fmt: skip


def seal_pages(
    tokens: torch.Tensor, jobs: torch.Tensor, fields: dict[str, torch.Tensor], spec: SideSpec
) -> torch.Tensor:
    """Encode full pages in place as `reference.seal_pages` does, with equal bytes and without waiting.

    Args and returns: as there. `fields` are contiguous.
    """
    damaged = torch.zeros((), dtype=torch.uint8, device=tokens.device)
    if jobs.shape[0] and spec.head_dim:
        codes = fields["codes"]
        if spec.token_words:
            return _seal_latents(tokens, jobs, fields, spec, damaged)
        if not spec.scheme.is_exact:
            codes = codes.view(torch.uint8)
        tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
        with device.on_device(tokens):
            seal_kernel[(jobs.shape[0], spec.num_kv_heads)](
                tokens, *tokens.stride()[:3], jobs.contiguous(), codes, fields.get("scale", codes),
                fields.get("offset", codes), damaged, **seal_constants(spec), num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    return damaged.bool()


def _seal_latents(
    tokens: torch.Tensor,
    jobs: torch.Tensor,
    fields: dict[str, torch.Tensor],
    spec: SideSpec,
    damaged: torch.Tensor,
) -> torch.Tensor:
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    with device.on_device(tokens):
        latent_seal_kernel[(jobs.shape[0],)](
            tokens, tokens.stride(0), tokens.stride(2), jobs.contiguous(), fields["codes"], fields["scale"],
            fields.get("offset", fields["scale"]), damaged, **latent_seal_constants(spec), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return damaged.bool()


def append_tokens(
    window: torch.Tensor, new: torch.Tensor, starts: torch.Tensor, skips: torch.Tensor
) -> None:
    """Write window[b, :, starts[b] : starts[b] + q_len - skips[b]] = new[b, :, skips[b] :], in place.

    Args:
        window: [rows, heads, slots, dim]; new: [rows, heads, q_len, dim] in its dtype; the last dimension of both
            is contiguous.
        starts: [rows], int32, first free slot of each row.
        skips: [rows], int32, leading tokens of `new` that are padding in each row.
    """
    rows, heads, slots, dim = window.shape
    q_len = new.shape[2]
    tokens = 1 if q_len == 1 else APPENDED
    with device.on_device(window):
        append_kernel[(rows, heads, -(-q_len // tokens))](
            window, *window.stride()[:3], new, *new.stride()[:3], starts, skips, slots, q_len,
            DIM=dim, WIDE=power_of_two(dim), TOKENS=tokens, num_warps=4,
        )  # fmt: skip
