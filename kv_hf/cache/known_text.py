"""Token ids of the text that a cache holds, as far as generate() or a file told them: compared once per call.

Tensors of ids stay on the device that they came on. Nothing here is called in a decode step.
"""

import torch


def first_difference(
    known: torch.Tensor, given: torch.Tensor, mask: torch.Tensor | None
) -> tuple[int, int] | None:
    """Return (row, column) of the first token that differs, None where all agree; waits for the device once.

    Args:
        known: [rows, columns] token ids.
        given: [rows, columns] token ids; what one of the two is longer is not compared.
        mask: [rows, columns of `given`], 0 or False = hidden: such columns are not compared; None hides none.
    """
    columns = min(known.shape[1], given.shape[1])
    differs = known[:, :columns].to(given.device) != given[:, :columns]
    if mask is not None:
        differs &= mask[:, :columns].to(given.device, torch.bool)
    if not bool(differs.any()):
        return None
    column = int(differs.any(0).nonzero()[0])
    return int(differs[:, column].nonzero()[0]), column


def joined(known: torch.Tensor, columns: int, behind: torch.Tensor | None = None) -> torch.Tensor:
    """Return the first `columns` of known ids with others behind them, as a copy that nobody else writes to.

    Args:
        known: [rows, at least columns] token ids.
        behind: [rows, any] token ids on the device that the result goes to; None: nothing.
    Returns: [rows, columns + those behind], int64.
    """
    with torch.inference_mode(False), torch.no_grad():
        kept = known[:, :columns]
        if behind is None:
            return kept.clone()
        return torch.cat([kept.to(behind.device, torch.long), behind.long()], dim=1)
