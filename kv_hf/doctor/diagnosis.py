"""All that the doctor looks at, put together."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CacheOptionError
from .environment import environment
from .findings import BROKEN, Finding
from .health import check_c_kernel, check_device, check_home, check_requirements
from .kernels import FormatReport, report_formats
from .layers import report_model, sizes_of
from .seams import check_seams, check_version
from .self_test import SECONDS, SelfTest, run_self_test


@dataclass(frozen=True)
class Subject:
    """The pages to examine: those of a model, or of plain sizes.

    Attributes:
        device, dtype, page_size: of the pages.
        head_dim: channels of a head.
        latent: (kv_lora_rank, qk_rope_head_dim) of a model with latent attention, or None.
        model: folder, preset or name of the model, or None.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    page_size: int = 64
    latent: tuple[int, int] | None = None
    model: str | None = None

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        page_size: int = 64,
        model: str | None = None,
    ) -> "Subject":
        """Take what is not given from the config of `model`, where one is named."""
        own = sizes_of(model) if model is not None else {}
        return cls(
            device,
            dtype or own.get("dtype", torch.bfloat16),
            own.get("head_dim", 128) if head_dim is None else head_dim,
            page_size,
            own.get("latent") if head_dim is None else None,
            model,
        )

    @property
    def dtype_name(self) -> str:
        """The dtype without "torch."."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        subject: what pages were looked at.
        environment: (what, found) for bug reports.
        formats: the kernel of every format.
        layers: (layers, how they are cached) of the model, where one is named.
        health: requirements, the C kernel, kv_hf's folder and the device.
        seams: the version of transformers and its seams.
        self_test: its results, or None where it was left out.
    """

    subject: Subject
    environment: list[tuple[str, str]]
    formats: list[FormatReport]
    layers: list[tuple[str, str]]
    health: list[Finding]
    seams: list[Finding]
    self_test: SelfTest | None

    @property
    def broken(self) -> list[str]:
        """Return the broken parts, in words; nothing if all is well."""
        found = [
            f"{finding.name}: {finding.detail}"
            for finding in (*self.health, *self.seams)
            if finding.status == BROKEN
        ]
        for trial in self.self_test.failed if self.self_test else ():
            found.append(f"self-test: {trial.format}, {trial.what}, {trial.kernel}: {trial.detail}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        subject = self.subject
        return {
            "healthy": not self.broken,
            "broken": self.broken,
            "environment": dict(self.environment),
            "subject": {
                "device": str(subject.device),
                "dtype": subject.dtype_name,
                "head_dim": None if subject.latent else subject.head_dim,
                "latent": list(subject.latent) if subject.latent else None,
                "page_size": subject.page_size,
                "model": subject.model,
            },
            "formats": [
                {"format": one.format, "kernel": one.kernel, "others": dict(one.others)}
                for one in self.formats
            ],
            "layers": [{"layers": which, "cached": how} for which, how in self.layers],
            "health": [finding.as_dict() for finding in self.health],
            "seams": [finding.as_dict() for finding in self.seams],
            "self_test": None if self.self_test is None else self.self_test.as_dict(),
        }


def examine(subject: Subject) -> Diagnosis:
    """Look at everything but the self-test, which may take its time and runs kernels.

    Raises: CacheOptionError for sizes that no cache has, a device that torch does not see, or a model without config.
    """
    formats = report_formats(
        subject.device, subject.dtype, subject.head_dim, subject.page_size, subject.latent
    )
    layers = report_model(subject.model) if subject.model is not None else []
    health = [*check_requirements(), check_c_kernel(), check_home(), check_device(subject.device)]
    seams = [check_version(), *check_seams()]
    return Diagnosis(subject, environment(), formats, layers, health, seams, None)


def self_test(subject: Subject, seconds: float = SECONDS) -> SelfTest:
    """Run the self-test on the device and sizes of `subject`. Raises CacheOptionError unless `seconds` is positive."""
    if not seconds > 0:
        raise CacheOptionError(f"seconds must be more than 0, got {seconds:g}")
    return run_self_test(
        subject.device,
        subject.dtype,
        subject.head_dim,
        subject.page_size,
        subject.latent,
        seconds=seconds,
    )
