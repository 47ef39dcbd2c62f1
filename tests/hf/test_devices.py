"""Models over several devices: accelerate's offloading on the CPU, and two pretended devices in a process of its own."""

import functools
import io
import json

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from devices_worker import CASES
from harness import TESTS, run_python, slow_but
from paged_inputs import needs_library
from tiny_models import left_padded, make_model, shared_model, tokens
from transformers import AutoModelForCausalLM

import kv_hf
from kv_hf.cache import layer_formats
from kv_hf.hf.generation import execution_devices
from kv_hf.spec import ROWS

CPU = torch.device("cpu")


# -- two devices -------------------------------------------------------------------------------------------


# `make test` runs these, `make test-all` the others too
QUICK = ("greedy_k8v4", "crop_select_and_copy", "keys_on_another_device_are_refused")


@functools.cache
def on_two_devices(quick: bool) -> dict[str, str]:
    """Case -> "ok" or its error; in a process of its own, since a device type cannot be unregistered."""
    cases = [case for case in CASES if (case in QUICK) == quick]
    found: dict[str, str] = json.loads(
        run_python(TESTS / "devices_worker.py", *cases).splitlines()[-1]
    )
    return found


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_two_devices(case):
    """Each layer's pages lie on its layer's device, and nothing crosses but by copies."""
    found = on_two_devices(case in QUICK)[case]
    assert found == "ok", found


# -- offloaded weights -------------------------------------------------------------------------------------

MAP = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "disk",
    "lm_head": "cpu",
}


def offloaded(how, folder):
    model = make_model("llama")
    if how == "cpu":
        cpu_offload(model, CPU)
    elif how == "disk":
        disk_offload(model, folder, CPU)
    elif how == "dispatch":
        dispatch_model(model, MAP, main_device="cpu", offload_dir=folder)
    else:
        model.save_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", device_map=MAP, offload_folder=folder
        )
        model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("how", ["cpu", "disk", "dispatch", "from_pretrained"])
def test_offloaded_weights_give_the_same_tokens(how, kernel, tmp_path):
    """Weights on "meta" between two forwards: a kernel named was refused for pages on meta."""
    model, batch = offloaded(how, tmp_path), left_padded([70, 30])
    out = model.generate(
        **batch,
        max_new_tokens=50,
        do_sample=False,
        cache_implementation="paged_exact",
        cache_config={"kernel": kernel},
        return_dict_in_generate=True,
    )
    want = shared_model("llama").generate(**batch, max_new_tokens=50, do_sample=False)
    assert torch.equal(out.sequences, want)
    assert {layer.device for layer in out.past_key_values.layers} == {CPU}


def test_execution_devices_are_those_of_the_hooks_not_of_the_weights():
    model = make_model("llama")
    assert execution_devices(model) == [CPU]
    model.to("meta")
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu"), append=True)
    add_hook_to_module(model.model.layers[0], AlignDevicesHook())
    second = AlignDevicesHook(execution_device=torch.device("cuda", 1))
    model.model.layers[1]._hf_hook = SequentialHook(AlignDevicesHook(), second)
    assert execution_devices(model) == [CPU, torch.device("cuda", 1)]


@needs_library
def test_a_named_kernel_is_refused_if_one_device_of_several_cannot_run_it():
    """Before the first forward; the device of the first weights alone would let it pass."""
    model = make_model("llama")
    model.model.layers[1]._hf_hook = AlignDevicesHook(execution_device=torch.device("cuda", 1))
    model.model._hf_hook = AlignDevicesHook(execution_device="cpu")
    with pytest.raises(kv_hf.CacheOptionError, match="the pages are on cuda:1"):
        model.generate(
            tokens(1, 5),
            cache_implementation="paged_exact",
            cache_config={"kernel": "c"},
            max_new_tokens=1,
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"recent_tokens": 40}, {"max_length": 128}, {"read": 128}, {"offload": "disk"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["paged_exact", "paged_k8v4"])
def test_a_default_device_that_is_not_the_model_s_changes_nothing(name, options):
    """Tables of pages were made there: with the model on it as well, each call ended in an error."""
    model, given = shared_model("llama"), left_padded([90, 33])
    options = {"cache_config": {"page_size": 16, **options}, "cache_implementation": name}
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            out = model.generate(
                **given, **options, max_new_tokens=30, return_dict_in_generate=True
            )
        out.past_key_values.batch_select_indices([1])
        out.past_key_values.crop(-40)
        found.append(out.sequences)
    assert torch.equal(*found)


# -- moved caches ------------------------------------------------------------------------------------------


def filled(**options):
    cache = kv_hf.PagedCache(shared_model("llama").config, keys="int4", **options)
    keys = torch.randn(2, 2, 90, 16, generator=torch.Generator().manual_seed(0))
    for index in range(2):
        cache.update(keys, keys, index)
    return cache


def loaded(cache, where):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False, map_location=where)


def test_a_cache_loaded_elsewhere_lies_there():
    """It kept the device of the machine that wrote it: every later key was refused."""
    cache = loaded(filled(), "meta")
    for layer in cache.layers:
        assert layer.storage.keys.fields["codes"].device.type == "meta"
        assert layer.device == layer.store.device == torch.device("meta")
        assert layer.store.kernel.name == "reference"
    keys = torch.ones(2, 2, 1, 16, device="meta")
    assert cache.update(keys, keys, 0)[0].shape == (2, 2, 91, 16)


@needs_library
def test_pages_of_a_gpu_are_read_on_the_cpu_and_the_kernel_says_why(monkeypatch):
    """A cache brought from a GPU keeps that layout: the C kernel cannot read it, and blamed the head size."""
    want = filled().layers[0].keys
    monkeypatch.setattr(layer_formats, "layout_for", lambda device: ROWS)
    cache = filled()
    assert cache.layers[0].store.kernel.name == "reference"
    assert torch.equal(cache.layers[0].keys, want)
    with pytest.raises(kv_hf.CacheOptionError, match="layout of another device's kernel"):
        filled(kernel="c")
