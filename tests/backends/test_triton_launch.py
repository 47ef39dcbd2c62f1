"""What a step launches and compiles, on a GPU that is not here: the real compiler, launches that do nothing."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from paged_inputs import make_kv, make_query

from kv_hf.backends.base import AttentionCall

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install -e '.[gpu]')"
)
BF16 = torch.bfloat16
ONCE = {"decode_kernel": 1, "combine_kernel": 1}


@pytest.fixture
def gpu():
    from fake_driver import pretend_gpu

    with pretend_gpu() as fake:
        yield fake


def attend(query, kv, **options):
    from kv_hf.backends.triton import decode

    return decode.paged_attention(AttentionCall(query, kv, 0.1, **options))


def bf16_kv(name="exact", pages=3, rows=1):
    return make_kv(name, rows=[(pages, 5)] * rows, dtype=BF16)


def of_table(kv, width):
    return replace(kv, block_table=kv.block_table[:, :1].repeat(1, width))


def test_attend_launches_twice_and_compiles_once_while_a_sequence_grows(gpu):
    """From 512 to 32k tokens in pages of 16: the number of splits goes through most numbers from 8 to 64."""
    kv = bf16_kv()
    query = make_query(kv, dtype=BF16)
    programs = set()
    for width in (*range(32, 300, 7), 1024, 2048):
        attend(query, of_table(kv, width))
        programs.add(gpu.launches[-2][1])
    assert gpu.names() == [*ONCE] * (len(gpu.launches) // 2)
    assert len(programs) > 20
    assert gpu.variants == ONCE


def test_chunks_of_all_lengths_share_one_variant(gpu):
    kv = bf16_kv()
    for q_len in range(1, 17):
        attend(make_query(kv, q_len, dtype=BF16), of_table(kv, 40))
    assert gpu.variants == {"decode_kernel": 2, "combine_kernel": 2}


def test_attend_compiles_once_for_numbers_at_odd_addresses(gpu):
    """Lengths are slices of one small tensor, whose addresses are multiples of 4 bytes only."""
    kv = bf16_kv()
    query = make_query(kv, dtype=BF16)
    for shift in range(4):
        numbers = torch.zeros(8, dtype=torch.int32)[shift:]
        attend(
            query, replace(kv, num_pages=numbers[:1], exact_lens=numbers[1:2], padding=numbers[2:3])
        )
    assert gpu.variants == ONCE


def test_attend_compiles_anew_for_queries_and_windows_at_odd_addresses(gpu):
    """Kernels take 16 bytes at a time of what lies at multiples of 16 bytes, and nothing else."""
    kv = bf16_kv()
    query = make_query(kv, dtype=BF16)
    attend(query, kv)
    odd = torch.empty(query.numel() + 1, dtype=BF16)[1:].view(query.shape)
    assert odd.data_ptr() % 16 == 2
    for _ in range(2):
        attend(odd, kv)
    assert gpu.variants == {"decode_kernel": 2, "combine_kernel": 1}
    assert len(gpu.launches) == 2 * 3


def test_attend_gives_strides_to_a_kernel_that_was_compiled_for_them(gpu):
    """Strides of 1 and multiples of 16 are parts of a kernel: a query that is cut otherwise has one of its own."""
    kv = bf16_kv()
    query = make_query(kv, dtype=BF16)
    wide = torch.zeros(*query.shape[:3], query.shape[3] + 3, dtype=BF16)
    attend(query, kv)
    attend(wide[..., :64], kv)
    attend(torch.zeros(*query.shape[:3], 128, dtype=BF16)[..., ::2], kv)  # made contiguous
    assert gpu.variants["decode_kernel"] == 2


def test_plans_are_kept_apart_by_what_they_depend_on(monkeypatch, gpu):
    """Each with constants of its own; that constants make kernels is the compiler's business, which takes seconds."""
    from kv_hf.backends.triton.direct import Kernel

    kv = bf16_kv()
    query = make_query(kv, dtype=BF16)
    mask = torch.ones(1, 1, 1, kv.seen)
    options = [
        {}, {"mask": mask.bool()}, {"mask": mask}, {"softcap": 5.0}, {"sliding_window": 7},
        {"sink_logits": torch.zeros(4)},
    ]  # fmt: skip
    launched = []
    monkeypatch.setattr(Kernel, "launch", lambda self, *args: launched.append(str(self.constants)))
    for _ in range(2):
        for given in options:
            attend(query, kv, **given)
    kernels = launched[::2]
    assert kernels[: len(options)] == kernels[len(options) :]
    assert len(set(kernels)) == len(kv.launches) == len(options)


def test_plans_do_not_pile_up(gpu):
    from kv_hf.backends.triton.direct import MOST

    kv = bf16_kv()
    kv.launches["another's"] = 1
    for slots in range(40, 40 + MOST + 3):
        windows = torch.zeros(2, 1, 2, slots, 64, dtype=BF16)
        attend(
            make_query(kv, dtype=BF16),
            replace(kv, residual_keys=windows[0], residual_values=windows[1]),
        )
    assert len(kv.launches) <= MOST
    assert kv.launches["another's"] == 1
    assert gpu.variants == ONCE


def seen_results(monkeypatch):
    """The addresses of the partial results of the launches to come, of which the kernel that merges them reads the same."""
    from kv_hf.backends.triton import direct

    seen = []
    real = direct.Compiled.__call__

    def call(self, x, y, z, stream, *arguments):
        if self.kernel.name == "decode_kernel":
            seen.append(arguments[5])
        else:
            assert arguments[0] == seen[-1]
        real(self, x, y, z, stream, *arguments)

    monkeypatch.setattr(direct.Compiled, "__call__", call)
    return seen


def test_layers_of_a_stream_share_their_workspace_and_streams_do_not(gpu, monkeypatch):
    seen = seen_results(monkeypatch)
    layers = [of_table(replace(bf16_kv(), launches={}), 40) for _ in range(2)]
    query = make_query(layers[0], dtype=BF16)
    for stream in (0, 7):
        gpu.stream = stream
        for kv in layers:
            attend(query, kv)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert not set(seen[0]) & set(seen[2])


def test_a_captured_graph_shares_no_results_with_other_launches(gpu, monkeypatch):
    """Graphs are replayed on any stream: what they write meanwhile lies in memory of their own."""
    from kv_hf.backends.triton import direct

    seen = seen_results(monkeypatch)
    kv = of_table(bf16_kv(), 40)
    query = make_query(kv, dtype=BF16)
    for capturing in (False, True, False):
        monkeypatch.setattr(direct, "is_capturing", lambda index, now=capturing: now)
        attend(query, kv)
    assert seen[0] == seen[2]
    assert not set(seen[0]) & set(seen[1])


def test_hooks_of_profilers_see_every_launch(gpu):
    from triton import knobs

    names = []

    def hook(about):
        names.append(about.get()["name"])

    kv = bf16_kv()
    query = make_query(kv, dtype=BF16)
    attend(query, kv)
    hooks = knobs.runtime.launch_enter_hook
    hooks.add(hook)
    called = []
    plan = next(iter(kv.launches.values()))

    def without_gpu(*args):
        about, enter, leave = args[6:9]
        if enter is not None:
            enter(about)
        called.append((about is None, enter is None, leave is None))

    for kernel in (plan.kernel, plan.last):
        kernel.compiled[0].run = without_gpu
    try:
        attend(query, kv)
    finally:
        hooks.remove(hook)
    attend(query, kv)
    assert names == [*ONCE]
    assert called == [(False, False, False)] * 2 + [(True, True, True)] * 2


def test_pretend_gpu_gives_everything_back():
    from fake_driver import pretend_gpu

    from kv_hf.backends import registry
    from kv_hf.backends.triton import support

    def state():
        return support.target_isa, support.why_not, registry.layout_for

    before = state()
    with pretend_gpu(80):
        assert support.target_isa(torch.device("cpu")) == 80
        assert registry.layout_for(torch.device("cpu")) == "rows"
    assert state() == before
