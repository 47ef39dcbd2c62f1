"""What a program takes of shared memory: of keys and values what any GPU has, of latents no more than is said without compiling."""

from importlib.util import find_spec

import pytest
import torch
from paged_inputs import latent_spec, page_spec

from kv_hf.backends.triton import meta_params
from kv_hf.formats import format_names
from kv_hf.spec import ROWS

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)
BF16, FP32 = torch.bfloat16, torch.float32
SMALLEST = 99 * 1024  # an RTX 4090's; 64 KiB on AMD
QUICK = {("sm_90", "int8", 64, BF16, 1), ("gfx942", "int8", 256, BF16, 1)}


def variants():
    for arch in ("sm_90", "gfx942"):
        for name in (*format_names("keys", "values"), "int2_mixed+int3_rotated"):
            for dim in (16, 64, 96, 128, 256):
                for dtype in (BF16, FP32):
                    for q_len in (1, 3) if dtype == BF16 else (1,):
                        given = (arch, name, dim, dtype, q_len)
                        marks = () if given in QUICK else pytest.mark.slow
                        yield pytest.param(*given, marks=marks, id="-".join(map(str, given)))


@pytest.mark.parametrize(("arch", "name", "dim", "dtype", "q_len"), variants())
def test_decode_takes_no_more_shared_memory_than_any_gpu_has(arch, name, dim, dtype, q_len):
    import aot

    groups = (None, 16 if dim % 32 else None)
    spec = page_spec(*name.split("+"), heads=8, key_dim=dim, dtype=dtype, groups=groups)
    taken = aot.compile_decode(spec, arch, query_dtype=dtype, q_len=q_len).metadata.shared
    assert taken <= (SMALLEST if arch == "sm_90" else 64 * 1024)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rank", [256, 512])
@pytest.mark.parametrize("name", format_names("latent"))
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_latent_decode_takes_no_more_shared_memory_than_is_said(arch, name, rank, dtype):
    import aot

    if name == "fp8_ds_mla" and dtype == FP32:
        pytest.skip("fp8_ds_mla is of 16-bit models")
    spec = latent_spec(name, None, rank=rank, rope=64, page=64, dtype=dtype, layout=ROWS)
    isa = 90 if arch == "sm_90" else meta_params.HIP
    said = meta_params.latent_bytes(spec, dtype, isa)
    taken = aot.compile_decode(spec, arch, query_dtype=dtype, group=16).metadata.shared
    assert taken <= said <= (232448 if arch == "sm_90" else 64 * 1024)
