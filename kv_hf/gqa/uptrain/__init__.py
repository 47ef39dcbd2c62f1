"""Training of converted checkpoints towards the models that they were made from.

Needs accelerate and datasets (`pip install kv_hf[train]`).
"""

from .run import UptrainReport, uptrain
from .settings import UptrainSettings

__all__ = ["UptrainReport", "UptrainSettings", "uptrain"]
