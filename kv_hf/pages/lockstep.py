"""The layers that have taken part in a step: layers of a group follow each other, and groups of a cache do too."""

from collections.abc import Iterable

from ..errors import InterruptedForwardError
from .step import Step


class Lockstep:
    """The steps of one group, counted; finds out when an earlier forward stopped half-way.

    The first layer that asks opens a step, the others join it, and each says when its own work on the step is done.
    A step may be opened only when every layer has done the last one, in this group and in those of `peers`.

    Attributes:
        epoch: steps opened so far.
        step: the last one.
        peers: the locksteps of the other groups of the cache.
        opening: a step is being put into force; outside of that, it was interrupted there.
    """

    def __init__(self) -> None:
        self.peers: tuple[Lockstep, ...] = ()
        self.opening = False
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self.step: Step | None = None
        self._begun: set[int] = set()  # layers that have joined the last step
        self._done: set[int] = set()  # those whose own work on it is done
        self._members: set[int] | None = None
        self.epoch = 0

    def walk_with(self, others: Iterable["Lockstep"]) -> None:
        """Refuse, from now on, a step that the other groups of the cache have not taken."""
        self.peers = tuple(others)

    def resume(self, members: Iterable[int]) -> None:
        """Stand behind a first step in which the layers `members` took part."""
        self.clear()
        self._done = set(members)
        self.epoch, self._members = 1, set(self._done)

    def begins(self, layer: int, layer_epoch: int, op: tuple) -> bool:
        """Say whether the step `op` is still to be opened for `layer`; else it joins the last one.

        Args:
            layer: who asks.
            layer_epoch: steps that this layer has done.
        Raises: InterruptedForwardError when an earlier step was not finished by all.
        """
        self.check_opened()
        if layer_epoch == self.epoch:
            self._check_may_open(op)
            return True
        if (
            layer_epoch != self.epoch - 1
            or self.step is None
            or self.step.op != op
            or layer in self._begun  # it joined, but its own work on this step failed
        ):
            raise InterruptedForwardError(
                f"layer {layer} cannot {op[0]} here: it has taken part in {layer_epoch} of {self.epoch} steps of "
                "this cache. An earlier forward stopped half-way, or layers were changed one without the others; "
                "call reset() and start again"
            )
        return False

    def open(self, step: Step) -> None:
        """Count `step`, which nobody has joined yet; `opening` is set by the caller, who changes more than this."""
        self.epoch += 1  # first: from here on no layer is up to date
        self.step = step
        self._begun = set()
        self._done = set()

    @property
    def begun(self) -> set[int]:
        """Layers that have joined the last step."""
        return self._begun

    def join(self, layer: int) -> Step:
        """Note that `layer` begins its own work on the last step; return the step."""
        self._begun.add(layer)
        assert self.step is not None
        return self.step

    def follow(self, layer: int, layer_epoch: int, op: tuple) -> Step | None:
        """Let `layer` join the last step where that is what it asks for; None where `begins` has to look closer."""
        step = self.step
        if (
            step is None
            or self.opening
            or layer_epoch != self.epoch - 1
            or step.op != op
            or layer in self._begun
        ):
            return None
        self._begun.add(layer)
        return step

    def done(self, layer: int) -> None:
        """Note that the work of `layer` on the last step is done."""
        self._done.add(layer)

    def begin_opening(self) -> None:
        """Note that a step, or a reset, is being put into force; not reached `end_opening`, it was interrupted there."""
        self.opening = True

    def end_opening(self) -> None:
        """Note that it is in force as a whole."""
        self.opening = False

    def check_opened(self) -> None:
        """Raise InterruptedForwardError where the last step was not put into force as a whole."""
        if self.opening:
            raise InterruptedForwardError(
                "a forward of this cache was stopped while it changed the rows; call reset() and start again"
            )

    def check_done(self) -> None:
        """Raise InterruptedForwardError where the last step was not put into force, or not done by all layers."""
        self.check_opened()
        first = self._begun if self.epoch == 1 else set()
        missing = (self._members or first) - self._done
        if missing:
            raise InterruptedForwardError(
                f"the last step of this cache stopped before layers {sorted(missing)} took part in it; "
                "the cache cannot be used further: call reset() and start again"
            )

    def _check_may_open(self, op: tuple) -> None:
        self.check_done()
        if self._members is None and self.epoch == 1:
            self._members = set(self._begun)
        for peer in self.peers:
            peer.check_opened()
            if not peer.epoch:
                continue  # not run by this process (pipeline stages), or it will notice when it is asked
            if peer.epoch == self.epoch:
                peer.check_done()
            elif peer.epoch != self.epoch + 1 or peer.step is None or peer.step.op != op:
                raise InterruptedForwardError(
                    "the layers of this cache have not taken part in the same steps: an earlier forward stopped "
                    "half-way; call reset() and start again"
                )
