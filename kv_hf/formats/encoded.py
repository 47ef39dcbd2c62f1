"""The check of what a format gives: whether codes, scales, offsets and numbers have the form that pages have room for.

Pages are written by index, where a result of another shape may fit by broadcasting: without this check it would be stored.
"""

import torch

from ..errors import CacheOptionError
from .base import Scheme


def check_encoded(result: object, shape: torch.Size, scheme: Scheme) -> None:
    """Raise CacheOptionError unless `result` is what `Format.encode` promises for whole pages.

    Shapes and dtypes are checked everywhere, values (codes that fit their bits, scales and offsets that are finite) on a
    CPU alone: elsewhere the host would wait for the device.

    Args:
        shape: (pages, num_kv_heads, page_size, head_dim) of the numbers that were encoded.
        scheme: with groups of plain sizes.
    """
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise _wrong(scheme, f"encode must return (codes, scale, offset), got {got}")
    codes, scale, offset = result
    pages, heads, tokens, dim = shape
    _check_form(scheme, "encode's codes", codes, tuple(shape), scheme.code_dtype)
    for what, given, group in (
        ("scale", scale, scheme.scale_group),
        ("offset", offset, scheme.offset_group),
    ):
        if group is None:
            if given is not None:
                raise _wrong(
                    scheme, f"encode's {what} must be None: the scheme has no {what}_group"
                )
            continue
        groups = (pages, heads, tokens // group[0], dim // group[1])
        _check_form(scheme, f"encode's {what}", given, groups, scheme.scale_dtype)
        if given.device.type == "cpu" and not bool(given.isfinite().all()):
            raise _wrong(
                scheme,
                f"encode's {what} must be finite for finite numbers, got inf or nan in {given.dtype}",
            )
    if scheme.bits < 8 and codes.device.type == "cpu" and codes.numel():
        largest = int(codes.max())
        if largest >> scheme.bits:
            raise _wrong(scheme, f"encode's codes must be below 2^{scheme.bits}, got {largest}")


def check_decoded(result: object, shape: torch.Size, scheme: Scheme) -> None:
    """Raise CacheOptionError unless `result` is fp32 of that shape, as `Format.decode` promises."""
    _check_form(scheme, "decode's numbers", result, tuple(shape), torch.float32)


def _check_form(
    scheme: Scheme, what: str, given: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not isinstance(given, torch.Tensor):
        raise _wrong(scheme, f"{what} must be a tensor, got {type(given).__name__}")
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise _wrong(
            scheme,
            f"{what} must be {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}",
        )


def _wrong(scheme: Scheme, says: str) -> CacheOptionError:
    return CacheOptionError(f"format {scheme.name!r}: {says}")
