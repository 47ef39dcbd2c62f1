"""Backends of other packages: registered in a few lines, used by name or by priority, listed wherever names are."""

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model, tokens

import kv_hf
from kv_hf import backends, cli
from kv_hf.backend_names import auto_names, kernel_choices
from kv_hf.backends import registry
from kv_hf.doctor.kernels import Subject, report_formats

CPU = torch.device("cpu")


class Counting:
    """The reference, counting its calls: what a package that adds a backend has to write."""

    def __init__(self):
        self.queries = []

    def load(self):
        reference = backends.load("reference")

        def attend(call):
            self.queries.append(call.query.shape[2])
            return reference.attend(call)

        return replace(reference, name="counting", attend=attend)


@pytest.fixture
def counting(request):
    """A registered backend; the parameter is its priority, or None."""
    found = Counting()
    backends.register_backend("counting", found.load, priority=getattr(request, "param", None))
    yield found
    backends.unregister_backend("counting")


def generate(**config):
    model = make_model("llama", num_hidden_layers=2)
    made = model.generate(
        tokens(1, 20),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        cache_implementation="paged_int4",
        cache_config=config,
    )
    return made.tolist()


def test_generate_uses_a_registered_backend(counting):
    assert generate(kernel="counting") == generate(kernel="reference")
    assert counting.queries == [1] * 8  # two layers, four tokens behind the prompt's


def test_compiled_decode_uses_a_registered_backend(counting):
    model = make_model("llama", num_hidden_layers=1)
    cache = kv_hf.PagedCache(model.config, keys="int4", kernel="counting", max_length=64)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
        step = torch.compile(model.forward, backend="eager", fullgraph=True)
        step(tokens(1, 1), past_key_values=cache)
    torch._dynamo.reset()
    assert counting.queries[-1] == 1
    assert cache.layers[0].store.kernel.name == "counting"


def test_auto_leaves_a_backend_without_priority_alone(counting):
    assert "counting" not in auto_names()
    generate(kernel="auto")
    assert counting.queries == []


@pytest.mark.parametrize("counting", [1000], indirect=True)
def test_auto_takes_the_highest_priority(counting):
    assert kernel_choices()[:2] == ("auto", "counting")
    generate(kernel="auto")
    assert counting.queries


@pytest.mark.parametrize("counting", [-1], indirect=True)
def test_auto_tries_the_lowest_priority_last(counting):
    assert auto_names()[-2:] == ("reference", "counting")


def test_doctor_lists_a_registered_backend(counting, capsys):
    for report in report_formats(Subject(CPU, torch.float32, 32, 16)):
        assert dict(report.others)["counting"] is None
    cli.main(["doctor", "--device", "cpu", "--head-dim", "32", "--seconds", "1000"])
    assert "counting" in capsys.readouterr().out


def test_messages_list_registered_backends(counting):
    with pytest.raises(kv_hf.CacheOptionError, match="counting"):
        kv_hf.CacheConfig(kernel="countin")


def test_unregistered_backends_are_unknown():
    with pytest.raises(kv_hf.CacheOptionError, match="kernel must be"):
        kv_hf.CacheConfig(kernel="counting")
    with pytest.raises(kv_hf.CacheOptionError, match="name must be"):
        backends.unregister_backend("counting")


def test_why_not_reaches_whoever_asks_by_name():
    backends.register_backend("never", Counting().load, why_not=lambda device, spec: "it is shy")
    try:
        with pytest.raises(
            kv_hf.CacheOptionError, match="kernel='never' cannot run here: it is shy"
        ):
            generate(kernel="never")
    finally:
        backends.unregister_backend("never")


@pytest.mark.parametrize("name", ["auto", "c", "two words", "", 3])
def test_register_backend_refuses_names(name):
    before = kernel_choices()
    with pytest.raises(kv_hf.CacheOptionError, match="name of a backend must be"):
        backends.register_backend(name, Counting().load)
    assert kernel_choices() == before


def test_pages_are_laid_out_for_the_best_backend():
    assert (registry.layout_for(CPU), registry.layout_for(torch.device("cuda"))) == (
        "lanes",
        "rows",
    )
    backends.register_backend("other", Counting().load, priority=1000, runs_on="cpu", layout="rows")
    try:
        assert registry.layout_for(CPU) == "rows"
    finally:
        backends.unregister_backend("other")


def test_unregister_backend_refuses_the_one_that_reads_all_pages():
    with pytest.raises(kv_hf.CacheOptionError, match="name must not be 'reference'"):
        registry.unregister_backend("reference")
    assert "reference" in registry.backend_names()
