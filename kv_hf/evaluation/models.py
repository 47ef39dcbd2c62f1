"""A model that is measured: where it and its weights come from, and what its measurements share: texts, exact distributions."""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file, extract_commit_hash

from ..checks import check_int
from ..hub import why_not_model
from ..model_fields import CONVERSION, UPTRAINING
from ..printable import short
from ..texts import cut_text, is_source, text_names, text_windows, token_windows
from .accuracy import PROTOCOL, ExactReference, measure_held, score, summary
from .caches import LayerShape, cache_kind, check_runs, layer_shapes
from .rows import Row

GIVEN = "given"  # what rows call a text that is no source
MODEL_FILES = (".json", ".model", ".txt", ".safetensors", ".bin")
SAMPLES, SAMPLE = 512, 4096  # places of a file that a revision reads, and bytes of each


def check_model_name(name: str) -> str:
    """Return a hub id or a folder as it is given. Loads nothing.

    Raises: ValueError for a folder that is not there or has no model, and for a name that the hub does not have.
    """
    reason = why_not_model(name)
    if reason is not None:
        raise ValueError(f"model {name!r}: {reason}")
    return name


def name_of(config: Any) -> str:
    """Return what rows call a model that was given without a name: the hub id or folder it was loaded from, else its type."""
    return str(config.name_or_path or config.model_type)


def revision_of(name: str) -> str:
    """Return what tells one state of a model's files from another: the hub's commit, or a digest of a folder's files.

    The digest reads the size of each file, and bytes of 512 places that are spread evenly over it: a model that was trained
    on differs in all of them, and a file of up to 2 MiB is read whole.

    Args:
        name: hub id or folder.
    """
    folder = Path(name)
    if not folder.is_dir():
        return str(extract_commit_hash(cached_file(name, "config.json"), None))[:12]
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(SAMPLES):
                file.seek(place * max(0, size - SAMPLE) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:12]


def lineage(config: Any, shapes: Sequence[LayerShape]) -> Row:
    """Return what a row says of a model's kv heads: how many, and how the checkpoint came to have them.

    Returns: "kv_heads" where all layers with keys have as many; of a checkpoint that `convert_to_gqa` wrote "conversion" (its
        method); of a trained one "uptrained_tokens".
    """
    heads = {shape[0] for shape in shapes if shape is not None}
    found: Row = {"kv_heads": heads.pop()} if len(heads) == 1 else {}
    if converted := getattr(config, CONVERSION, None):
        found["conversion"] = converted["method"]
    if trained := getattr(config, UPTRAINING, None):
        found["uptrained_tokens"] = trained["tokens"]
    return found


@dataclass(frozen=True)
class TextSettings:
    """The scored text: windows of one source, one behind the other, or of each text of a set.

    Attributes:
        text: a file, a bundled text or a dataset, see `texts.load_text`; or a set of bundled texts, see `texts.SETS`.
        windows: texts cut from each source, at most.
        window: tokens of each.
        prompt: tokens of each that are not scored; at least two are.
    Raises: CacheOptionError for numbers that cannot be.
    """

    text: str = "held_out"
    windows: int = 2
    window: int = 1600
    prompt: int = 512

    def __post_init__(self) -> None:
        check_int("windows", self.windows, 1)
        check_int("window", self.window, 3)
        check_int("prompt", self.prompt, 1, self.window - 2)


class Measured:
    """A model in memory, ready to be measured with any cache; texts and exact distributions are shared by all caches.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        name: what rows call the model; None: see `name_of`.
        revision: what rows say of the state of its files, see `revision_of`; None: not known.
    """

    def __init__(
        self, model: Any, tokenizer: Any, name: str | None = None, revision: str | None = None
    ) -> None:
        self.model, self.tokenizer, self.revision = model, tokenizer, revision
        self.name = name or name_of(model.config)
        self._given: str | list[list[int]] = ""
        # of the last settings alone: those of a long text are large
        self.reference = functools.lru_cache(1)(self._reference)

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """Shapes of the layers' keys and values, see `caches.layer_shapes`."""
        return layer_shapes(self.model)

    def give(self, text: Any) -> str:
        """Return what settings name a text by: a source as it is; texts and token ids are kept here under a name.

        Args:
            text: a source, see `TextSettings`; a text itself, which has a space or the end of a line; or token ids, [tokens]
                or [texts, tokens].
        """
        self.reference.cache_clear()
        if isinstance(text, str | Path):
            self._given = "" if isinstance(text, Path) or is_source(text) else text
            return GIVEN if self._given else str(text)
        try:
            ids = torch.as_tensor(text, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            ids = torch.zeros(0, device="cpu")
        if not ids.ndim or not ids.numel() or ids.dtype == torch.bool or ids.is_floating_point():
            raise ValueError(
                f"text must be a file, a bundled text, a dataset, a text itself, or token ids [tokens] or [texts, tokens], got {short(text)}"
            )
        known = self.model.get_input_embeddings().num_embeddings
        if not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise ValueError(
                f"text has the token ids {int(ids.min())} to {int(ids.max())}, and the model knows 0 to {known - 1}"
            )
        self._given = ids.reshape(-1, ids.shape[-1]).tolist()
        return GIVEN

    def _reference(self, settings: TextSettings) -> tuple[dict[str, int], ExactReference]:
        """Return how many windows each text has, and the exact distributions of all windows.

        Raises: ValueError for a text that is empty, or too short for one window, and as `ExactReference` does.
        """
        windows, texts = {}, []
        for name in text_names(settings.text):
            sizes, given = (settings.window, settings.windows), self._given
            if isinstance(given, list):
                cut = list(itertools.chain(*(token_windows(row, *sizes) for row in given)))
            elif given:
                cut = cut_text(self.tokenizer, given, *sizes)
            else:
                cut = text_windows(self.tokenizer, name, *sizes)
            windows[name] = len(cut)
            texts += [torch.tensor(ids, device=self.model.device) for ids in cut]
        return windows, ExactReference(self.model, texts, settings.prompt)

    def accuracy(self, cache: str, settings: TextSettings) -> Row:
        """Return the distances of a cache from the exact one and the bytes it holds, as fields of a row.

        Args:
            cache: name with options, see `caches.cache_kind`.
        Returns: model, its revision and cache; the fields of `summary` over all texts, the same of each text, and those
            of `measure_held`.
        Raises: ValueError when the cache cannot run here, for a bad text, and for logits that are not finite.
        """
        check_runs(cache, self.model)
        kind, config = cache_kind(cache), self.model.config
        made: list[Any] = []

        def make() -> Any:
            made[:] = [kind.make(config, settings.window)]
            return made[0]

        windows, reference = self.reference(settings)
        scored_tokens = sum(len(ids) - settings.prompt for ids in reference.texts)
        with tqdm(total=scored_tokens, desc=cache, unit="token", disable=None) as bar:
            scored = score(reference, make, cache, bar.update)
        texts, left = {}, iter(scored)
        for name, count in windows.items():
            texts[name] = summary(list(itertools.islice(left, count)))
        ids = [text.tolist() for text in reference.texts]
        return {
            "model": self.name,
            "model_revision": self.revision,
            "cache": cache,
            **asdict(settings),
            "windows": len(ids),
            "protocol": PROTOCOL,
            # what tells texts apart that have one name
            "text_digest": hashlib.sha256(str(ids).encode()).hexdigest()[:12],
            **lineage(config, self.shapes),
            **measure_held(config, self.shapes, kind, settings.window, settings.prompt, made[0]),
            **summary(scored),
            "texts": texts,
            "worst_text": max(texts, key=lambda name: texts[name]["kl_mean"]),
        }


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
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        super().__init__(model.to(device).eval(), tokenizer, name, revision_of(folder))
