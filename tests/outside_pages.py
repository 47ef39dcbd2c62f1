"""Pages outside of a device that is not there: host memory as both, and layers of a few pages."""

from kv_hf.pages import offload
from kv_hf.pages.copy_stream import InOrder
from kv_hf.pages.host_memory import HostMemory
from kv_hf.pages.host_pages import HostPages


class LateLane(InOrder):
    """Two buffers, and copies that run as late as they may: when a kernel waits for them."""

    buffers = 2
    late = True

    def __init__(self):
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


class EagerLane(LateLane):
    """Two buffers, and copies that run as early as they may."""

    late = False


class FakeLayer:
    """A layer of a few pages outside, each filled with its own number."""

    def __init__(self, layer_idx, spec, pages=12):
        self.layer_idx, self.spec, self.written, self.plan = layer_idx, spec, None, None
        self.home = HostPages(spec, HostMemory(pinned=False))
        for page in range(pages):
            self.home.grow(page + 1)
        for extent in self.home.extents:
            for fields in extent.sides:
                for at in range(extent.count):
                    fields["codes"][at] = 1000 * layer_idx + extent.first + at

    def read_by(self, plan):
        self.plan = plan


def place_outside(place, monkeypatch):
    """Return options that put pages outside: "disk", or through two buffers as on a GPU, copied "eager" or "late"."""
    if place == "disk":
        return {"offload": "disk"}
    lane = {"eager": EagerLane, "late": LateLane}[place]
    monkeypatch.setattr(offload.OffloadArena, "make_lane", lambda self, device: lane())
    monkeypatch.setattr(offload.OffloadArena, "check_device", lambda self, device: None)
    return {"offload": "cpu"}
