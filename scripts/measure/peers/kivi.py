"""KIVI's codes (arXiv 2402.02750): keys per channel, values per token, groups of 32, no clipping, no sinks.

KIVI keeps a residual of R = 128 tokens. Its keys are quantized 128 at a time, so that 0 to 127 of them are exact; of its
values the newest 128 are. Pages hold keys and values of the same tokens, so that two names enclose KIVI:

    kivi_intN          pages of 128: the keys' rule to the token, and as many exact values (KIVI: always 128)
    kivi_intN_window   pages of 32 behind the newest 128: at least KIVI's exact tokens on both sides (128 to 159)
"""

from typing import Any

from kv_hf.formats import Scheme
from kv_hf.formats.linear import RangeFormat

GROUP = 32
RESIDUAL = 128


class Kivi(RangeFormat):
    """Integer codes from the minimum to the maximum of a group: a channel's 32 tokens, or a token's 32 channels."""

    group_options = {"keys": "key_group_size", "values": "value_group_size"}

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return groups of 32, or of `group_size`: tokens of a key's channel, channels of a value's token."""
        size = GROUP if group_size is None else group_size
        group = (1, size) if side == "values" else (size, 1)
        return self.made(group, group)


class Kivi2(Kivi):
    """Codes 0 .. 3."""

    name = "kivi_int2"
    bits = 2
    native_number = 5  # the arithmetic of int2, which the compiled kernels read


class Kivi4(Kivi):
    """Codes 0 .. 15."""

    name = "kivi_int4"
    bits = 4
    native_number = 4  # the arithmetic of int4


FORMATS = (Kivi2, Kivi4)


def _options(name: str, **sizes: int) -> dict[str, Any]:
    return {"keys": name, "values": name, "sink_tokens": 0, **sizes}


CACHES: dict[str, dict[str, Any]] = {}
for _kind in FORMATS:
    CACHES[_kind.name] = _options(_kind.name, page_size=RESIDUAL)
    CACHES[f"{_kind.name}_window"] = _options(_kind.name, page_size=GROUP, recent_tokens=RESIDUAL)
