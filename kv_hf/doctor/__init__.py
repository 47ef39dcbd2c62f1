"""A diagnosis of this machine: the kernels that would run, the reasons, versions and devices, a self-test.

diagnosis = kv_hf.doctor.examine(kv_hf.doctor.Subject(torch.device("cpu")))
diagnosis.broken  # [] where all is well
"""

from .doctor_command import Diagnosis as Diagnosis
from .doctor_command import Finding as Finding
from .doctor_command import environment as environment
from .doctor_command import examine as examine
from .kernels import FormatReport as FormatReport
from .kernels import Subject as Subject
from .kernels import paged_names as paged_names
from .kernels import report_formats as report_formats
from .kernels import report_model as report_model
from .self_test import SelfTest as SelfTest
from .self_test import Trial as Trial
from .self_test import plan_trials as plan_trials
from .self_test import self_test as self_test
