"""What a step launches and compiles, on a GPU that is not here: the real compiler, launches that do nothing."""

from dataclasses import replace

import pytest
import torch
from paged_inputs import make_kv, make_query

from kv_hf.backends.base import AttentionCall

BF16 = torch.bfloat16
ONCE = {"decode_kernel": 1, "combine_kernel": 1}


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


def chunks_of_all_lengths(kv):
    for q_len in range(1, 17):
        yield make_query(kv, q_len, dtype=BF16), of_table(kv, 40)


def numbers_at_odd_addresses(kv):
    """Lengths are slices of one small tensor, whose addresses are multiples of 4 bytes only."""
    for shift in range(4):
        numbers = torch.zeros(8, dtype=torch.int32)[shift:]
        parts = {"num_pages": numbers[:1], "exact_lens": numbers[1:2], "padding": numbers[2:3]}
        yield make_query(kv, dtype=BF16), replace(kv, **parts)


def queries_at_odd_addresses(kv):
    """Kernels take 16 bytes at a time of what lies at multiples of 16 bytes, and nothing else."""
    query = make_query(kv, dtype=BF16)
    yield query, kv
    odd = torch.empty(query.numel() + 1, dtype=BF16)[1:].view(query.shape)
    assert odd.data_ptr() % 16 == 2
    yield from [(odd, kv)] * 2


def queries_that_are_cut_otherwise(kv):
    """Strides of 1 and multiples of 16 are parts of a kernel; other channels are made contiguous."""
    query = make_query(kv, dtype=BF16)
    wide = torch.zeros(*query.shape[:3], query.shape[3] + 3, dtype=BF16)
    apart = torch.zeros(*query.shape[:3], 128, dtype=BF16)
    yield from ((one, kv) for one in (query, wide[..., :64], apart[..., ::2]))


@pytest.mark.parametrize(
    ("calls", "decode", "combine"),
    [
        (chunks_of_all_lengths, 2, 2),
        (numbers_at_odd_addresses, 1, 1),
        (queries_at_odd_addresses, 2, 1),
        (queries_that_are_cut_otherwise, 2, 1),
    ],
)
def test_attend_compiles_as_few_variants_as_there_are(gpu, calls, decode, combine):
    for query, kv in calls(bf16_kv()):
        attend(query, kv)
    assert gpu.variants == {"decode_kernel": decode, "combine_kernel": combine}


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


def test_the_kernel_that_merges_reads_what_the_one_before_it_has_written(gpu, monkeypatch):
    from kv_hf.backends.triton import direct

    seen = []
    real = direct.Kernel.launch

    def launch(self, x, y, z, index, arguments):
        given = arguments(direct.address)
        seen.append(given[5 if self.jit.__name__ == "decode_kernel" else 0])
        real(self, x, y, z, index, arguments)

    monkeypatch.setattr(direct.Kernel, "launch", launch)
    kv = of_table(bf16_kv(), 40)
    for _ in range(2):
        attend(make_query(kv, dtype=BF16), kv)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert len({*seen[0]}) == 2
