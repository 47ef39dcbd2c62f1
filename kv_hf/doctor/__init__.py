"""A diagnosis of this machine: the kernels that would run, the reasons, versions and devices, a self-test.

diagnosis = kv_hf.doctor.examine(kv_hf.doctor.Subject(torch.device("cpu")))
diagnosis.broken  # [] where all is well
"""

from .doctor_command import examine
from .kernels import FormatReport, Subject, paged_names, report_formats, report_model
from .self_test import self_test

__all__ = [
    "FormatReport",
    "Subject",
    "examine",
    "paged_names",
    "report_formats",
    "report_model",
    "self_test",
]
