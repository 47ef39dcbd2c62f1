"""A model of the evaluation with what its measurements share: texts, exact distributions, exact continuations."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import cached_file

from ..files.reading import BESIDE_BYTES, read_bytes
from ..formats import ATTENTION_NAME
from ..texts import text_names, text_windows
from .accuracy import PROTOCOL, check_texts
from .by_text import measure_texts
from .cache_bytes import layer_shapes, measure_held
from .cache_kinds import CacheKind, cache_kind, why_not
from .divergence import greedy, measure_divergence
from .lineage import lineage
from .model_name import check_model_name
from .prefill import Prefill
from .reference import ExactReference

SAMPLES, SAMPLE = 512, 4096  # places of a weight file that a revision reads, and bytes of each


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


def digest_of(texts: Sequence[torch.Tensor]) -> str:
    """Return what tells texts apart that have one name: a digest of their token ids, [tokens] each."""
    ids = [text.tolist() for text in texts]
    return hashlib.sha256(str(ids).encode()).hexdigest()[:12]


class LoadedModel:
    """A model, ready to be measured with any cache.

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
        self.name = name
        self.device = torch.device(device)
        self.revision = revision_of(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = self.prepared(model.to(self.device).eval())
        # it reads transformers' own caches by sdpa, so that all are measured by one attention
        self.model.set_attn_implementation(ATTENTION_NAME)
        self._references: dict[TextSettings, ExactReference] = {}
        self._windows: dict[TextSettings, dict[str, list[torch.Tensor]]] = {}
        self._continuations: tuple[tuple[TextSettings, int], list[Prefill], torch.Tensor] | None = (
            None
        )

    def prepared(self, model: Any) -> Any:
        """Return the model that is measured; a subclass may make another one of the checkpoint's."""
        return model

    @cached_property
    def shapes(self) -> list[Any]:
        """Shapes of the layers' keys and values, see `held.layer_shapes`."""
        return layer_shapes(self.model)

    def reference(self, settings: TextSettings) -> ExactReference:
        """Return the exact distributions of a text; those of the text before are let go.

        Raises: ValueError for a text that is empty, too short for one window, or longer than the model reads.
        """
        if settings not in self._references:
            texts = [ids for windows in self.windows(settings).values() for ids in windows]
            check_texts(self.model, texts, settings.prompt)
            self._references = {settings: ExactReference(self.model, texts, settings.prompt)}
        return self._references[settings]

    def windows(self, settings: TextSettings) -> dict[str, list[torch.Tensor]]:
        """Return the windows of each text, token ids [tokens]; those of the settings before are let go."""
        if settings not in self._windows:
            length, count = settings.window, settings.windows
            cut = {
                name: text_windows(self.tokenizer, name, length, count)
                for name in text_names(settings.text)
            }
            windows = {
                name: [torch.tensor(ids, device=self.device) for ids in found]
                for name, found in cut.items()
            }
            self._windows = {settings: windows}
        return self._windows[settings]

    def continuations(
        self, settings: TextSettings, tokens: int
    ) -> tuple[list[Prefill], torch.Tensor]:
        """Return the windows' prompts and their greedy continuations with the exact cache: [windows, tokens].

        Each prompt runs alone: transformers' fp8 cache shares one scale among the rows of a batch.
        """
        if self._continuations is None or self._continuations[0] != (settings, tokens):
            texts = self.reference(settings).texts
            prefills = [Prefill(self.model, ids[None, : settings.prompt]) for ids in texts]
            exact = [
                greedy(one, DynamicCache(config=self.model.config), tokens) for one in prefills
            ]
            self._continuations = ((settings, tokens), prefills, torch.cat(exact))
        return self._continuations[1:]

    def accuracy(
        self,
        cache: str | CacheKind,
        settings: TextSettings,
        divergence_tokens: int = 64,
        progress: Any = lambda tokens: None,
    ) -> dict[str, Any]:
        """Return the distances of a cache from the exact one and the bytes it holds, as fields of a row.

        Args:
            cache: name with options, see `cache_kinds.cache_kind`, or a kind that has no name there.
            divergence_tokens: greedy tokens behind each prompt that are compared; 0 compares none.
            progress: called with the tokens scored since the last call.
        Raises: ValueError when the cache cannot run here, for a bad text, and for logits that are not finite.
        """
        kind = cache_kind(cache) if isinstance(cache, str) else cache
        reason = why_not(cache, self.device) if isinstance(cache, str) else None
        if reason is not None:
            raise ValueError(f"cache {cache!r} cannot run here: {reason}")
        reference = self.reference(settings)

        def make() -> Any:
            return kind.make(self.model.config, settings.window + divergence_tokens)

        several = measure_texts(
            self.model,
            self.windows(settings),
            {kind.name: make},
            settings.prompt,
            progress,
            reference,
        )[kind.name]
        found = several.pooled
        held = measure_held(self.model.config, self.shapes, kind, settings.window, settings.prompt)
        row = {
            **asdict(settings),
            "windows": len(reference.texts),
            "text_digest": digest_of(reference.texts),
            "protocol": PROTOCOL,
            **lineage(self.model.config, self.shapes),
            **asdict(found),
            **several.row(),
            **held.row(),
        }
        row["bits_per_element"] = found.bits_per_element or None  # unknown for other caches
        if divergence_tokens:
            prompts, exact = self.continuations(settings, divergence_tokens)
            apart = measure_divergence(prompts, make, divergence_tokens, exact)
            row |= {f"divergence_{name}": value for name, value in asdict(apart).items()}
        return row
