"""Models of the evaluation by their short names: packaged models beside hub ids and folders."""

from pathlib import Path

import torch

from kv_hf.evaluation.models import LoadedModel, revision_of
from measure.models.packaged import resolve_model


def model_revision(name: str) -> str:
    """Return what tells one state of a model's files from another, see `revision_of`."""
    return revision_of(resolve_model(name))


def weight_bytes(name: str) -> int:
    """Return the bytes of a folder's weight files, as a measure of what a token costs; 1 where they are elsewhere."""
    folder = Path(resolve_model(name))
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(path.stat().st_size for path in files) or 1


class PackagedModel(LoadedModel):
    """A model, ready to be measured with any cache, whose name may be that of a packaged one."""

    def __init__(
        self, name: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(name, dtype, device, resolve_model(name))
