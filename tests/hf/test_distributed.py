"""Models over several processes and devices, split by transformers, accelerate and torch.distributed: same tokens."""

from pathlib import Path

import pytest
import tiny_latent
import torch
from harness import TESTS, run_python
from processes_worker import continued, load
from tiny_models import make_config, make_model, tokens
from torch.nn.parallel.scatter_gather import gather
from transformers.distributed import DistributedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

import kv_hf

SIZES = {"vocab_size": 98, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
STAGES = "pp_size" in DistributedConfig.__dataclass_fields__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models, beside which `of_ranks` lays what two processes made of them."""
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama", **SIZES).save_pretrained(folder)
    for family in ("deepseek_v2", "deepseek_v32"):
        tiny_latent.make_model(family, vocab_size=98).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path):
    return load(folder)


def of_ranks(folder: Path, parallelism: str) -> list[dict]:
    """Return what each of two processes found, which start at the first call for a kind of parallelism."""
    paths = [folder / f"{parallelism}_{rank}.pt" for rank in (0, 1)]
    if not paths[0].exists():
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        run_python(*launch, TESTS / "processes_worker.py", folder, parallelism)
    return [torch.load(path, weights_only=False) for path in paths]


# -- tensor parallel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", "int4"])
def test_tensor_parallel_gives_the_tokens_of_one_process(folder, model, name):
    want = continued(model, f"paged_{name}")
    for rank in of_ranks(folder, "tensor"):
        assert torch.equal(rank[name], want) and rank["heads"] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v32"])
def test_sharded_latent_attention_is_expanded_and_said_once(folder, family):
    want = continued(load(folder / family), "dynamic")
    for rank in of_ranks(folder, "latent"):
        assert torch.equal(rank[family], want) and torch.equal(rank[f"{family} dynamic"], want)
        if family in tiny_latent.families_of_transformers(cached="k_(nope|pass)"):
            assert len([one for one in rank[f"{family} said"] if "is sharded" in one]) == 1
            assert "is sharded (tensor parallelism)" in rank[f"{family} error"]


# -- pipeline stages ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not STAGES, reason="this transformers has no pipeline parallelism")
class TestPipeline:
    @pytest.mark.parametrize("name", ["exact", "int4"])
    def test_padded_rows_give_the_tokens_of_one_process(self, folder, model, name):
        """transformers 5.23 itself loses the padding in later stages: it asks layer 0 for the mask's length."""
        want = continued(model, f"paged_{name}")
        for rank in of_ranks(folder, "pipeline"):
            assert torch.equal(rank[name], want)

    def test_rollbacks_give_the_tokens_of_one_process(self, folder, model):
        want = model.generate(tokens(1, 70), max_new_tokens=70, do_sample=False)
        for rank in of_ranks(folder, "pipeline"):
            assert torch.equal(rank["lookup"], want)

    def test_a_stage_holds_its_layers_only_and_knows_the_length(self, folder):
        first, second = of_ranks(folder, "pipeline")
        assert first["rows"] == [1, 0] and second["rows"] == [0, 1]
        # a layer that follows the last one run here is not asked
        assert first["lengths"] == [83, 0]
        assert second["lengths"] == [83, 83]


# -- data parallel -----------------------------------------------------------------------------------------


def test_caches_gathered_by_data_parallel_are_refused_with_the_remedy():
    """nn.DataParallel builds the class of an output from its gathered parts, as DynamicCache(ddp_cache_data)."""
    config = make_config("llama")
    outputs = []
    for _ in range(2):
        cache = kv_hf.PagedCache(config)
        cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
        outputs.append(CausalLMOutputWithPast(past_key_values=cache))
    with pytest.raises(kv_hf.UnsupportedModelError, match="one process and one cache per device"):
        gather(outputs, 0)
