"""Training of converted checkpoints towards the models that they were made from.

Needs accelerate and datasets (`pip install -e '.[train]'` in the clone).
"""

from importlib.util import find_spec

for _name in ("accelerate", "datasets"):
    if find_spec(_name) is None:
        raise ImportError(
            f"uptraining needs {_name}: pip install -e '.[train]' in the clone", name=_name
        )

from .run import UptrainReport, uptrain  # noqa: E402  (behind what says what is missing)
from .settings import UptrainSettings  # noqa: E402

__all__ = ["UptrainReport", "UptrainSettings", "uptrain"]
