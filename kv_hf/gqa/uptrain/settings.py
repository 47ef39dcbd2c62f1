"""The settings of an uptraining: length, speed, data and target."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...checks import check_choice, check_int
from ...errors import ConversionError

DTYPES = ("auto", "float32", "bfloat16", "float16")
TRAINED = ("all", "attention")
# settings that may differ between a run and the one that it goes on with
MAY_CHANGE = ("steps", "minutes", "lr", "save_every", "evaluations")


@dataclass(frozen=True)
class UptrainSettings:
    """Settings of an uptraining.

    Attributes:
        steps: updates of the weights; None where `minutes` says how long.
        minutes: of training, evaluations and saving not counted. With both, whatever ends first.
        lr: largest learning rate; it rises over `warmup` steps and falls to 0 as a cosine.
        warmup: steps.
        batch: windows that a process takes at once.
        accumulate: batches of each process that make one step.
        length: tokens of a window; None takes the model's own, at most 1024.
        alpha: weight of the distillation (KL); 1 - alpha is that of the cross entropy with the text.
        temperature: that the logits of both models are divided by in the distillation.
        train: "all" parameters, or those of "attention" modules only.
        dtype: of the computation; weights and their sums are kept in fp32. "auto": bfloat16 where the device has it, fp32 on CPUs.
        weight_decay, clip: of AdamW; largest norm of a step's gradient.
        seed: of the order of windows, and of sampled text.
        tokens: taken from the data, at most.
        sample_tokens: sampled from the teacher, where "self" is among the data.
        save_every: steps between two states that a run can go on with.
        evaluations: during training, at equal distances; before and after is measured anyway.
    """

    steps: int | None = None
    minutes: float | None = None
    lr: float = 1e-4
    warmup: int = 20
    batch: int = 8
    accumulate: int = 1
    length: int | None = None
    alpha: float = 0.9
    temperature: float = 1.0
    train: str = "all"
    dtype: str = "auto"
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    tokens: int = 50_000_000
    sample_tokens: int = 300_000
    save_every: int = 200
    evaluations: int = 3

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConversionError("give steps or minutes: one of them must say how long to train")
        if self.steps is not None:
            check_int("steps", self.steps, 1)
        for name in ("batch", "accumulate", "tokens", "sample_tokens", "save_every"):
            check_int(name, getattr(self, name), 1)
        for name in ("warmup", "seed", "evaluations"):
            check_int(name, getattr(self, name), 0)
        if self.length is not None:
            check_int("length", self.length, 2)
        if self.minutes is not None:
            check_number("minutes", self.minutes, above=0)
        for name in ("lr", "temperature", "clip"):
            check_number(name, getattr(self, name), above=0)
        check_number("weight_decay", self.weight_decay, least=0)
        check_number("alpha", self.alpha, least=0, most=1)
        check_choice("train", self.train, TRAINED)
        check_choice("dtype", self.dtype, DTYPES)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return "name: other's value, own value" of all settings that make another run of it."""
        return [
            f"{field.name}: {other.get(field.name)!r} then, {getattr(self, field.name)!r} now"
            for field in fields(self)
            if field.name not in MAY_CHANGE and other.get(field.name) != getattr(self, field.name)
        ]


def check_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float | None = None
) -> None:  # fmt: skip
    """Raise ConversionError unless `value` is a finite number within these bounds."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if (
        right
        and (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
    ):
        return
    bounds = [f"above {above}"] if above is not None else []
    bounds += [f"of at least {least}"] if least is not None else []
    bounds += [f"of at most {most}"] if most is not None else []
    raise ConversionError(f"{name} must be a number {' and '.join(bounds)}, got {value!r}")


def mixed_precision(dtype: str, device: torch.device) -> str:
    """Return accelerate's word for a dtype setting on a device. Raises ConversionError for what it cannot do."""
    kind = device.type
    if dtype == "auto":
        if kind == "cpu":
            return "no"
        has = torch.cuda.is_bf16_supported() if kind == "cuda" else kind in ("xpu", "hpu", "npu")
        return "bf16" if has else "no"
    if dtype == "float16" and kind == "cpu":
        raise ConversionError(
            "dtype float16 needs a GPU: take float32 or bfloat16 to train on a CPU"
        )
    return {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[dtype]
