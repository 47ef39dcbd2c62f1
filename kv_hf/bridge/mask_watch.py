"""The comparison of single-token masks with the cache's padding, without waiting for the device."""

from typing import Any

import torch

from ..errors import CacheMismatchError
from ..pages import moved
from ..pages.awaited import Awaited
from ..pages.step import Numbers

NOT_ALL_SHOWN = (
    "the attention_mask of an earlier forward of one token did not show all columns behind the left padding. On this device "
    "such masks are compared without waiting, one forward late, so that tokens that it hid were attended to. Hide columns in "
    "the prompt's mask already, or pass a 4D mask; call cache.reset() and start again"
)


class MaskWatch:
    """Compares 2D masks with the left padding that a group knows.

    On the CPU the answer is there at once. On another device a step of one token does not wait for it: where the last
    mask that was waited for (the prompt's) hid just the padding, the masks of the tokens behind it are taken to do the
    same, as generate() appends ones; the answer is looked at in a later forward, and a wrong one raises there.
    """

    def __init__(self) -> None:
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: answers that are awaited belong to this process."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was asked and what is trusted."""
        self._trusted = False
        self._asked: list[tuple[Awaited, str]] = []
        self._padding: tuple[bytes, torch.Tensor] | None = None

    def later(self, mask: torch.Tensor, single: bool) -> bool:
        """Say whether the mask [rows, columns] of a forward of one token (`single`) is compared later."""
        return single and self._trusted and not moved.is_host(mask.device)

    def hides_padding_only(self, mask: torch.Tensor, padding: Numbers, single: bool) -> bool:
        """Say whether `mask` [rows, columns] shows all columns but each row's `padding`.

        Raises: CacheMismatchError where an earlier mask, taken to do so, did not.
        """
        self.look()
        same = self._same(mask, padding)
        if not self.later(mask, single):
            self._trusted = bool(same)
            return self._trusted
        self.ask(same, NOT_ALL_SHOWN)
        return True

    def ask(self, right: torch.Tensor, message: str) -> None:
        """Look at `right` ([], bool, on a device) in a later forward; raise with `message` if it is False then."""
        self._asked.append((Awaited(right), message))

    def look(self) -> None:
        """Look at the answers that are there. Raises CacheMismatchError for a mask that hid or showed something else."""
        while self._asked:
            answer = self._asked[0][0].look()
            if answer is None:
                return
            _, message = self._asked.pop(0)
            if not answer:
                self.clear()
                raise CacheMismatchError(message)

    def _same(self, mask: torch.Tensor, padding: Numbers) -> torch.Tensor:
        key = padding.tobytes()
        if (
            self._padding is None
            or self._padding[0] != key
            or self._padding[1].device != mask.device
        ):
            known = moved.moved(torch.from_numpy(padding.copy()), mask.device)
            self._padding = key, known[:, None]
        columns = torch.arange(mask.shape[1], device=mask.device)
        return (mask.bool() == (columns >= self._padding[1])).all()
