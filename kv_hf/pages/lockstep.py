"""Who has taken part in which step: layers of a group follow each other, and groups of a cache do too."""

from collections.abc import Callable, Iterable

from ..errors import InterruptedForwardError
from .step import Step


class Lockstep:
    """The steps of one group, counted; finds out when an earlier forward stopped half-way.

    The first layer that asks opens a step, the others join it. A step may be opened only when every layer has
    taken part in the last one, in this group and in those of `peers`.

    Attributes:
        epoch: steps opened so far.
        step: the last one.
        peers: the locksteps of the other groups of the cache.
    """

    def __init__(self) -> None:
        self.peers: tuple[Lockstep, ...] = ()
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self.epoch = 0
        self.step: Step | None = None
        self._joined: set[int] = set()
        self._members: set[int] | None = None

    def resume(self, members: Iterable[int]) -> None:
        """Stand behind a first step in which the layers `members` took part."""
        self.clear()
        self._joined = set(members)
        self.epoch, self._members = 1, set(self._joined)

    def enter(self, layer: int, layer_epoch: int, op: tuple, plan: Callable[[tuple], Step]) -> Step:
        """Open the step `op` by `plan(op)`, or join it; return it.

        Args:
            layer: who asks.
            layer_epoch: steps that this layer has taken part in.
        Raises: InterruptedForwardError when an earlier step was not finished by all.
        """
        if layer_epoch == self.epoch:
            self._check_may_open(op)
            self.step = plan(op)
            self.epoch += 1
            self._joined = set()
        elif (
            layer_epoch != self.epoch - 1
            or self.step is None
            or self.step.op != op
            or layer in self._joined  # it joined, but its own work on this step failed
        ):
            raise InterruptedForwardError(
                f"layer {layer} cannot {op[0]} here: it has taken part in {layer_epoch} of {self.epoch} steps of "
                "this cache. An earlier forward stopped half-way, or layers were changed one without the others; "
                "call reset() and start again"
            )
        self._joined.add(layer)
        assert self.step is not None
        return self.step

    def _check_may_open(self, op: tuple) -> None:
        self._check_all_joined()
        for peer in self.peers:
            if not peer.epoch:
                continue  # not run by this process (pipeline stages), or it will notice when it is asked
            if peer.epoch == self.epoch:
                peer._check_all_joined()
            elif peer.epoch != self.epoch + 1 or peer.step is None or peer.step.op != op:
                raise InterruptedForwardError(
                    "the layers of this cache have not taken part in the same steps: an earlier forward stopped "
                    "half-way; call reset() and start again"
                )

    def _check_all_joined(self) -> None:
        if self._members is None and self.epoch == 1:
            self._members = set(self._joined)
        missing = (self._members or set()) - self._joined
        if missing:
            raise InterruptedForwardError(
                f"the last step of this cache stopped before layers {sorted(missing)} took part in it; "
                "the cache cannot be used further: call reset() and start again"
            )
