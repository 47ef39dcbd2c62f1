"""fp8_ds_mla: the record of DeepSeek's kernels for latents."""

from .base import Scheme
from .linear import Float8Format


class Fp8DsMla(Float8Format):
    """e4m3 in groups of 128 numbers with fp32 scales, beside exact RoPE keys.

    656 bytes for a rank of 512 and 64 bf16 RoPE channels. Source: FlashMLA, deepseek-ai.
    """

    name = "fp8_ds_mla"
    sides = ("latent",)
    k_rope = "exact"
    native_number = 6

    def scheme(self, side: str, group_size: int | None = None) -> Scheme:
        """Return the groups of the record, whose size is no option."""
        return self.made((1, 128), scale_bits=32)
