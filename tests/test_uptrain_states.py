"""Uptraining: runs that repeat and go on bit for bit, rates that change, figures that are not finite, full disks."""

import os
import signal
from dataclasses import replace

import pytest
import tiny_mha
import torch
from tiny_uptrain import SHORT, make_pair, make_tokenizer, run

from kv_hf.gqa.convert import convert_to_gqa


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("states"))


def stop_at(step):
    def stop(state):
        if state.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return stop


# -- dropout -----------------------------------------------------------------------------------------------

DROPOUT = {
    "llama": {"attention_dropout": 0.5, "vocab_size": 97, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 97, "n_positions": 64},  # 0.1 in three places, as GPT-2 itself
}


@pytest.mark.parametrize("family", DROPOUT)
def test_models_with_dropout_repeat_and_go_on_bit_for_bit(family, tmp_path):
    teacher = tiny_mha.save(tiny_mha.make(family, **DROPOUT[family]), tmp_path / "teacher")
    make_tokenizer().save_pretrained(teacher)
    convert_to_gqa(teacher, tmp_path / "student", 1)
    pair, settings = (tmp_path / "student", teacher), replace(SHORT, steps=4, evaluations=0)
    torch.manual_seed(1)
    report = run(pair, tmp_path / "a", settings)
    torch.manual_seed(2)
    assert not run(pair, tmp_path / "b", settings, progress=stop_at(2)).finished
    rest = run(pair, tmp_path / "b", settings, resume=True)
    assert rest.finished and rest.losses == report.losses
    alike = run((teacher, teacher), tmp_path / "c", replace(settings, steps=1))
    assert abs(alike.losses[0][1]) < 1e-6
