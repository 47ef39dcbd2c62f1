"""Undo the Hadamard transform of values in registers: sums and differences of two numbers, in the order of quant/codec.py.

Knows nothing of codes, scales and softmax.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _stages(SIZE):
    """Return how many times two numbers are summed in a transform of SIZE numbers."""
    return SIZE.bit_length() - 1


@triton.constexpr_function
def _places(CHUNKS):
    """Return how many places of a run each chunk of rotated values holds."""
    return CHUNKS[0][2]


@triton.constexpr_function
def _number(p, WIDTH, RUNS, SIZE):
    """Return the number of part p, which holds SIZE channels, among all parts in the order of their channels."""
    return ((p % RUNS) * WIDTH + p // RUNS * SIZE) // SIZE


@triton.constexpr_function
def _partner(p, STAGE, WIDTH, RUNS, SIZE):
    """Return the part that part p is summed with in a stage across parts."""
    first = (_number(p, WIDTH, RUNS, SIZE) ^ (1 << STAGE)) * SIZE
    return first % WIDTH // SIZE * RUNS + first // WIDTH


@triton.constexpr_function
def _is_second(p, STAGE, WIDTH, RUNS, SIZE):
    """Return whether part p is the one that is taken from its partner in a stage across parts."""
    return bool(_number(p, WIDTH, RUNS, SIZE) >> STAGE & 1)


@triton.jit
def _sum_rows(x, STEP: tl.constexpr):
    """Replace rows of x [rows, columns] that lie STEP apart by their sum and their difference."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, [ROWS // (2 * STEP), 2, STEP, COLUMNS]), (0, 2, 3, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(pairs, [ROWS, COLUMNS])


@triton.jit
def _sum_channels(x, STEP: tl.constexpr):
    """Replace channels of x [tokens, channels] that lie STEP apart by their sum and their difference."""
    TOKENS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, [TOKENS, CHANNELS // (2 * STEP), 2, STEP]), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
    return tl.reshape(pairs, [TOKENS, CHANNELS])


@triton.jit
def _unrotate_rows(x, SIZE: tl.constexpr):
    """Transform neighbouring runs of SIZE rows of x [rows, columns], both powers of two."""
    for stage in tl.static_range(_stages(SIZE)):
        x = _sum_rows(x, 1 << stage)
    return x


@triton.jit
def unrotate_channels(x, SIZE: tl.constexpr):
    """Transform neighbouring runs of SIZE channels of x [tokens, channels], all powers of two."""
    for stage in tl.static_range(_stages(SIZE)):
        x = _sum_channels(x, 1 << stage)
    return x


@triton.jit
def unrotate_parts(
    parts, WIDTH: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Transform neighbouring runs of BLOCK channels of sums [channels, columns] that lie in parts (see tiles.py)."""
    SIZE: tl.constexpr = _places(CHUNKS)
    new = ()
    for p in tl.static_range(len(parts)):
        new = new + (_unrotate_rows(parts[p], SIZE),)
    for stage in tl.static_range(_stages(BLOCK // SIZE)):
        old = new
        new = ()
        for p in tl.static_range(len(old)):
            other = old[_partner(p, stage, WIDTH, RUNS, SIZE)]
            if _is_second(p, stage, WIDTH, RUNS, SIZE):
                new = new + (other - old[p],)
            else:
                new = new + (old[p] + other,)
    return new
