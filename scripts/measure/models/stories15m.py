"""The file format of Andrej Karpathy's llama2.c (MIT): a model, and behind it a tokenizer. Both become an fp32 checkpoint.

stories15M is a small real model in which every head has keys and values of its own. Nothing of its package is run.
"""

import math
import struct
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BYTES_BEGIN, PIECES_BEGIN = 3, 259  # ids of the 256 bytes, of the first piece of text


def convert_llama2c(source: Path, folder: Path) -> None:
    """Write a llama2.data (model and tokenizer in one file) as a checkpoint that transformers loads."""
    data = source.read_bytes()
    model, end = read_model(data)
    model.save_pretrained(folder)
    read_tokenizer(data[end:], model.config.max_position_embeddings).save_pretrained(folder)


def read_model(data: bytes) -> tuple[LlamaForCausalLM, int]:
    """Return the model at the beginning of a llama2.c file, and the bytes it takes there.

    Its first format: seven int32 of sizes, then fp32 weights by kind, then the tables of RoPE, which are computed anew.
    """
    hidden, inner, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", data[:28])
    head_dim = hidden // heads
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
        dtype="float32",
    )
    at = 28

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = math.prod(shape)
        found = torch.frombuffer(bytearray(data[at : at + 4 * count]), dtype=torch.float32)
        at += 4 * count
        return found.view(shape)

    kv = kv_heads * head_dim
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
    own["lm_head.weight"] = own["model.embed_tokens.weight"]
    for kind, stacked in kinds.items():
        own |= {f"model.layers.{i}.{kind}.weight": each for i, each in enumerate(stacked)}
    model = LlamaForCausalLM(config)
    model.load_state_dict(own)
    # a story ends where the next one would begin
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[1, 2], pad_token_id=0)
    return model.eval(), at + 4 * length * head_dim


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Return projections [layers, heads * head_dim, in] for rotations of (i, i + head_dim / 2) from those of (2i, 2i + 1)."""
    pairs = weight.unflatten(1, (heads, -1, 2))
    return pairs.transpose(2, 3).reshape(weight.shape)


def read_tokenizer(data: bytes, length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a llama2.c file: int32 longest piece, then (fp32 score, int32 size, UTF-8) per piece.

    Pieces merge by score, best first; what no piece covers becomes bytes (ids 3 to 258).
    """
    pieces: list[str] = []
    scores: list[float] = []
    at = 4
    while at < len(data):
        score, size = struct.unpack("<fi", data[at : at + 8])
        text = data[at + 8 : at + 8 + size].decode(errors="replace")
        at += 8 + size
        if BYTES_BEGIN <= len(pieces) < PIECES_BEGIN:
            text = f"<0x{len(pieces) - BYTES_BEGIN:02X}>"
        pieces.append(text.replace(" ", "▁") if len(pieces) >= PIECES_BEGIN else text.strip())
        scores.append(score)
    vocab = {piece: place for place, piece in enumerate(pieces)}
    splits = [
        (-scores[place], vocab[piece[:cut]], vocab[piece[cut:]], (piece[:cut], piece[cut:]))
        for piece, place in vocab.items()
        if place >= PIECES_BEGIN
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges = [pair for *_, pair in sorted(splits)]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    words = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(
        [AddedToken(p, special=True, normalized=False) for p in pieces[:3]]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        model_max_length=length,
    )
