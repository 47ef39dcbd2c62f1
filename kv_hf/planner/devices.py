"""Memory and bandwidth of well-known devices: memory as the driver reports it, bandwidth as the data sheet prints it.

A driver reports less or more than a data sheet prints in GB of 10**9 bytes: 23.99 GiB for an RTX 4090 of 24 GB (22.35 GiB). Where
no driver's figure was found, `reported` is False and memory is the data sheet's. Programs can allocate somewhat less than the
driver reports, because the driver keeps a part: torch says 23.64 GiB on an RTX 4090, and 31.36 GiB on an RTX 5090.
"""

from dataclasses import dataclass

from ..checks import check_choice

GB = 10**9
MIB = 2**20


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        memory: bytes, None where it is what one buys.
        memory_source: where that is read: the tool that prints the driver's figure, and a public place that shows its output.
        bandwidth: of that memory, in bytes per second, as the data sheet has it: no program gets all of it.
        source: the data sheet.
        reported: whether `memory` is the driver's figure; False for a data sheet's.
    """

    name: str
    memory: int | None
    memory_source: str
    bandwidth: int
    source: str
    reported: bool = True

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, whose memory is what one buys."""
        return self.memory is None


def _gpu(name: str, mib: int, seen: str, bandwidth: int, source: str) -> Device:
    """Return a GPU of NVIDIA, with the MiB that nvidia-smi prints behind the slash."""
    return Device(name, mib * MIB, f"nvidia-smi {mib:,} MiB, {seen}", bandwidth * GB, source)


def _mac(
    name: str, gib: int, seen: str, bandwidth: int, source: str, reported: bool = True
) -> Device:
    """Return a Mac's GPU, with the GiB of memory that Metal recommends it to use at most."""
    what = f"recommendedMaxWorkingSetSize {gib} GiB, {seen}"
    return Device(name, gib * 2**30, what, bandwidth * GB, source, reported)


MODAL = "modal-labs/modal-client#2797"
_LIST = (
    _gpu("b200", 183_359, "NVIDIA/TensorRT-LLM#10278", 8_000, "NVIDIA DGX B200 data sheet, an eighth of 64 TB/s"),
    _gpu("h200", 143_771, "sgl-project/sglang#3196", 4_800, "NVIDIA H200 data sheet, SXM"),
    _gpu("h100", 81_559, "NVIDIA/nccl#1264", 3_350, "NVIDIA H100 data sheet, SXM"),
    _gpu("h100-nvl", 95_830, "NVIDIA/gpu-admin-tools#4", 3_900, "NVIDIA H100 data sheet, NVL"),
    _gpu("h100-pcie", 81_559, "outputs in public repositories", 2_000, "NVIDIA H100 PCIe product brief"),
    _gpu("a100-80gb", 81_920, MODAL, 2_039, "NVIDIA A100 data sheet, 80GB SXM"),
    _gpu("a100-40gb", 40_960, MODAL, 1_555, "NVIDIA A100 data sheet, 40GB SXM"),
    _gpu("l40s", 46_068, MODAL, 864, "NVIDIA L40S data sheet"),
    _gpu("l4", 23_034, MODAL, 300, "NVIDIA L4 data sheet"),
    _gpu("a10", 23_028, MODAL, 600, "NVIDIA A10 data sheet"),
    Device("v100-32gb", 32 * GB, "no driver's figure found: 32 GB of the data sheet", 900 * GB, "NVIDIA V100 data sheet, SXM2", False),
    _gpu("t4", 15_360, MODAL, 320, "NVIDIA T4 data sheet"),
    _gpu("rtx5090", 32_607, "noonghunna/club-3090#617", 1_792, "NVIDIA RTX Blackwell architecture paper, RTX 5090"),
    _gpu("rtx4090", 24_564, "vllm-project/vllm#7553", 1_008, "NVIDIA Ada architecture paper, RTX 4090"),
    _gpu("rtx3090", 24_576, "noonghunna/club-3090#390", 936, "NVIDIA Ampere GA102 architecture paper, RTX 3090"),
    Device("mi300x", 206_141_652_992, "kfd mem_banks 206,141,652,992 bytes, 8 parts in ROCm/legacy-rocm-build#4750", 5_300 * GB, "AMD Instinct MI300X data sheet"),
    _mac("m4-max", 96, "as an M3 Max with 128 GB: no figure of its own found", 546, "Apple, MacBook Pro technical specifications, M4 Max with 40 GPU cores", False),
    _mac("m3-max", 96, "128 GB, raullenchai/Rapid-MLX#183", 400, "Apple, MacBook Pro technical specifications, M3 Max with 40 GPU cores"),
    _mac("m2-ultra", 144, "192 GB, raullenchai/Rapid-MLX#183", 800, "Apple, Mac Studio technical specifications, M2 Ultra"),
    Device("cpu-ddr5-2ch", None, "", 89_600_000_000, "JEDEC DDR5-5600: 2 channels x 8 bytes x 5,600 MT/s"),
    Device("cpu-ddr5-12ch", None, "", 460_800_000_000, "AMD EPYC 9004 data sheet: 12 channels of DDR5-4800"),
)  # fmt: skip
DEVICES = {device.name: device for device in _LIST}


def find_device(name: str) -> Device:
    """Return the device called `name`, in any case. Raises CacheOptionError for a name that is not in DEVICES."""
    known = name.lower() if isinstance(name, str) else name
    check_choice("device", known, DEVICES)
    return DEVICES[known]
