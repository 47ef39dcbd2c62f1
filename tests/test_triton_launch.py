"""What a step launches and compiles, on a GPU that is not here: the real compiler, launches that do nothing."""

from importlib.util import find_spec

import pytest
import torch
from paged_inputs import make_kv, make_query

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install 'kv_hf[gpu]')"
)


@pytest.fixture
def gpu():
    from kv_hf.kernels.triton.fake_driver import pretend_gpu

    with pretend_gpu() as fake:
        yield fake


def test_pretend_gpu_counts_launches_and_gives_everything_back(gpu):
    from kv_hf.kernels.triton import launch

    kv = make_kv("int4", rows=[(3, 5)], dtype=torch.bfloat16)
    query = make_query(kv, dtype=torch.bfloat16)
    for _ in range(3):
        launch.paged_attention(query, kv, softmax_scale=0.1)
    assert gpu.names() == 3 * ["decode_kernel"]
    assert gpu.variants == {"decode_kernel": 1}
