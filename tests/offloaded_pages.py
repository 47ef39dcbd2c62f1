"""Pages off a device that is not there: host memory as both, and layers of a few pages."""

import torch

from kv_hf.pages import offload
from kv_hf.pages.cpu_memory import DiskMemory, HostMemory
from kv_hf.pages.staging import Copies
from kv_hf.pages.storage import carve, carved_bytes

CPU = torch.device("cpu")


class LateCopies(Copies):
    """Two buffers, and copies that run as late as they may: when a kernel waits for them."""

    late = True

    def __init__(self):
        super().__init__(CPU)
        self.buffers = 2
        self.waiting, self.marks, self.log, self.kept = [], 0, [], []

    def mark(self):
        self.marks += 1
        return self.marks

    def run(self, copy, after):
        self.log.append(("run", tuple(after)))
        self.waiting.append(copy)
        if not self.late:
            self.wait()
        return len(self.log)

    def keep(self, target):
        self.kept.append(target.data_ptr())

    def join(self, event):
        self.log.append(("join", event))
        if event is not None:
            self.wait()

    def wait(self):
        while self.waiting:
            self.waiting.pop(0)()


class EagerCopies(LateCopies):
    """Two buffers, and copies that run as early as they may."""

    late = False


class FakeLayer:
    """An offloaded layer of a few pages, each filled with its own number; `fetched` are the runs that were copied."""

    def __init__(self, layer_idx, spec, pages=12):
        self.layer_idx, self.spec, self.written, self.fetched = layer_idx, spec, None, []
        self.host = HostMemory()
        self.sides = carve(self.host.allocate(carved_bytes(spec, pages)), spec, pages)
        for fields in self.sides:
            for page in range(pages):
                fields["codes"][page] = 1000 * layer_idx + page

    def fetch(self, runs, targets):
        self.fetched += [(page, count) for _, page, count in runs]
        for side, fields in zip(self.sides, targets, strict=True):
            self.host.fetch(side, runs, fields)

    def expect(self, pages):
        raise AssertionError("there are two buffers")


def place_outside(place, monkeypatch):
    """Return options that offload pages: "disk", or through two buffers as on a GPU, copied "eager" or "late"."""
    if place == "disk":
        monkeypatch.setattr(
            DiskMemory, "piece_bytes", 5000
        )  # a few pages of these layers at a time
        return {"offload": "disk"}
    copies = {"eager": EagerCopies, "late": LateCopies}[place]
    monkeypatch.setattr(offload.OffloadArena, "make_copies", lambda self, device: copies())
    monkeypatch.setattr(offload.OffloadArena, "check_device", lambda self, device: None)
    return {"offload": "cpu"}
