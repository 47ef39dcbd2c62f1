"""A diagnosis of this machine: the kernels that would run, the reasons, the seams of transformers, a self-test.

diagnosis = kv_hf.doctor.examine(kv_hf.doctor.Subject(torch.device("cpu")))
diagnosis.broken  # [] where all is well
"""

from .diagnosis import Diagnosis, Subject, examine, self_test
from .environment import environment
from .findings import Finding
from .kernels import FormatReport, report_formats
from .layers import report_model, sizes_of
from .self_test import SelfTest
from .trials import Trial

__all__ = [
    "Diagnosis",
    "Finding",
    "FormatReport",
    "SelfTest",
    "Subject",
    "Trial",
    "environment",
    "examine",
    "report_formats",
    "report_model",
    "self_test",
    "sizes_of",
]
