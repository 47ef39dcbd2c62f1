"""One tile of values to weighted sums, with scales folded into the weights (docs/kernels.md has the algebra).

Knows nothing of rows, splits and softmax. Channels lie on the rows of the products, query columns on their columns. VALUES is
a meta_params.Operand.
"""

import triton
import triton.language as tl

from .dequant import run_unit, tile_unit, unpack, unpack_planes
from .tiles import dtype_of, load_held, rescale

ROWS = tl.constexpr(16)  # the fewest rows of a matrix product


@triton.jit
def no_offsets(VALUES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return zeros for the sums of weight * offset that `add_values` adds to."""
    TILE: tl.constexpr = VALUES.tile
    GROUPS: tl.constexpr = VALUES.groups
    sums = ()
    if VALUES.by_rows:
        sums = (tl.zeros([ROWS, COLUMNS], tl.float32),)
    elif VALUES.code == "unsigned" and VALUES.fold == "token":
        for _ in tl.static_range(GROUPS):
            sums = sums + (tl.zeros([TILE, COLUMNS], tl.float32),)
    return sums


@triton.jit
def _load_live(pointers, live, GUARD: tl.constexpr):
    if GUARD:
        x = tl.load(pointers, mask=tl.zeros(pointers.shape, tl.int32) < live, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_value_factors(values, tokens, live, VALUES: tl.constexpr, GUARD: tl.constexpr):
    """Load a tile's scales (and offsets) of values, to be used one tile later.

    Args:
        values: Fields; tokens: [tokens], block * page size + place in the page.
        live: where GUARD, 1 if there is such a tile and 0 if nothing is to be read.
    Returns: fold "token": scale of each group [tokens], and behind them the offsets of unsigned codes, alike or as one
        [groups, tokens] (VALUES.by_rows); else ().
    """
    GROUPS: tl.constexpr = VALUES.groups
    factors = ()
    if VALUES.fold == "token":
        first = tokens * GROUPS
        for g in tl.static_range(GROUPS):
            factors = factors + (_load_live(values.scale + first + g, live, GUARD),)
        if VALUES.by_rows:
            rows = first[None, :] + tl.arange(0, GROUPS)[:, None]
            factors = factors + (_load_live(values.offset + rows, live, GUARD),)
        elif VALUES.code == "unsigned":
            for g in tl.static_range(GROUPS):
                factors = factors + (_load_live(values.offset + first + g, live, GUARD),)
    return factors


@triton.jit
def add_exact(rows, held, weights, acc, CUT: tl.constexpr, HELD: tl.constexpr, DTYPE: tl.constexpr):
    """Add weights [tokens, columns] times exact values to the parts of acc; `rows` [tokens] points to channels."""
    w = weights.to(DTYPE)
    new = ()
    for p in tl.static_range(len(CUT.parts)):
        lane = tl.arange(0, CUT.parts[p].size)
        where = rows[None, :] + (CUT.parts[p].place + lane)[:, None]
        if HELD:
            inside = (lane < CUT.parts[p].held)[:, None]
            x = tl.load(where, mask=held[None, :] & inside, other=0.0)
        else:
            x = load_held(where, lane[:, None], CUT.parts[p].held)
        new = new + (tl.dot(x.to(DTYPE), w, acc[p], input_precision="ieee"),)
    return new


@triton.jit
def add_values(values, loaded, block, token, weights, keep, acc, offsets, VALUES: tl.constexpr):
    """Add LIFT * weights [tokens, columns] times the tile of values that begins with `token` to the parts of acc.

    Args:
        values, block, token: as for keys; loaded: of `load_value_factors`.
        keep: [columns], what the earlier sums are multiplied by.
        acc: parts of [size, columns], in units of boost * tile_unit * run_unit.
        offsets: of `no_offsets`, sums of LIFT * weight * offset: of group g on row g, or per group [tokens, columns] that are
            still to be added up over tokens.
    Returns: acc, offsets.
    """
    CUT: tl.constexpr = VALUES.cut
    DTYPE: tl.constexpr = dtype_of(VALUES.dtype)
    lane = token + tl.arange(0, VALUES.tile)
    if VALUES.fold == "none":
        rows = values.codes + block * (VALUES.page * VALUES.dim) + lane * VALUES.dim
        return add_exact(rows, lane, weights, rescale(acc, keep), CUT, False, DTYPE), offsets
    else:
        factors, sums = _fold(loaded, weights, keep, offsets, VALUES, DTYPE)
        codes = values.codes + block * (VALUES.page * VALUES.row) + lane
        tokens = (block * VALUES.page + lane) * VALUES.groups
        return _add_codes(codes, values, tokens, factors, keep, acc, VALUES, DTYPE), sums


@triton.jit
def _fold(loaded, weights, keep, offsets, VALUES: tl.constexpr, DTYPE: tl.constexpr):
    """Return the weights of each channel group [tokens, columns], with its scales, and the new sums of offsets."""
    GROUPS: tl.constexpr = VALUES.groups
    factors = ()
    sums = ()
    if VALUES.fold == "element":
        factors = (weights.to(DTYPE),)
    else:
        for g in tl.static_range(GROUPS):
            s = loaded[g].to(tl.float32) * (VALUES.boost / 2.0**VALUES.lift)
            factors = factors + ((weights * s[:, None]).to(DTYPE),)
        if VALUES.by_rows:
            rows = loaded[GROUPS].to(DTYPE)[None]
            rows = tl.broadcast_to(rows, [ROWS // GROUPS, GROUPS, VALUES.tile])
            rows = tl.reshape(rows, [ROWS, VALUES.tile])
            total = offsets[0] * keep[None, :]
            sums = (tl.dot(rows, weights.to(DTYPE), total, input_precision="ieee"),)
        elif VALUES.code == "unsigned":
            for g in tl.static_range(GROUPS):
                o = loaded[GROUPS + g].to(tl.float32)
                sums = sums + (tl.fma(offsets[g], keep[None, :], weights * o[:, None]),)
    return factors, sums


@triton.jit
def _add_codes(
    codes, values, tokens, factors, keep, acc, VALUES: tl.constexpr, DTYPE: tl.constexpr
):
    """Add one tile of codes, see `add_values`.

    Args:
        codes: [tokens], pointers to each token's byte in the first row of bytes; rows lie a page's tokens apart.
        tokens: [tokens], each one's first scale and offset, read here where the fold is "element".
        factors: of `_fold`.
    """
    CUT: tl.constexpr = VALUES.cut
    NUMBERS: tl.constexpr = tl.float32 if VALUES.fold == "element" else DTYPE
    CODE: tl.constexpr = VALUES.code
    PLANE: tl.constexpr = VALUES.page * VALUES.dim // 8
    new = ()
    for c in tl.static_range(len(CUT.chunks)):
        lane = tl.arange(0, CUT.chunks[c].size)
        inside = (lane < CUT.chunks[c].held)[:, None]
        where = codes[None, :] + ((CUT.chunks[c].byte + lane) * VALUES.page)[:, None]
        x = load_held(where, lane[:, None], CUT.chunks[c].held)
        if VALUES.bits == 3:
            second = load_held(where + PLANE, lane[:, None], CUT.chunks[c].held)
            third = load_held(where + 2 * PLANE, lane[:, None], CUT.chunks[c].held)
            runs = unpack_planes(x, second, third, NUMBERS, VALUES.isa)
        else:
            runs = unpack(x, CODE, VALUES.bits, NUMBERS, VALUES.isa)
        for r in tl.static_range(len(runs)):
            v = runs[r]
            total = acc[CUT.chunks[c].first + r] * keep[None, :]
            if VALUES.fold == "element":
                group = (CUT.parts[CUT.chunks[c].first + r].place + lane) // VALUES.group
                at = tokens[None, :] + group[:, None]
                v = v * tl.load(values.scale + at, mask=inside, other=0.0).to(tl.float32)
                if VALUES.code == "unsigned":
                    o = tl.load(values.offset + at, mask=inside, other=0.0).to(tl.float32)
                    v = v + (o if VALUES.offset == 1.0 else o * VALUES.offset)
                w = factors[0]
            else:
                w = factors[CUT.parts[CUT.chunks[c].first + r].place // VALUES.group]
            new = new + (tl.dot(v.to(DTYPE), w, total, input_precision="ieee"),)
    return new


@triton.constexpr_function
def _unit_of(RUN, VALUES):
    """Return what the codes of run `RUN` are multiplied by in sums of them."""
    unit = tile_unit(VALUES.bits, VALUES.isa) * run_unit(RUN, VALUES.bits, VALUES.isa)
    return VALUES.boost * unit


@triton.jit
def settle(acc, offsets, VALUES: tl.constexpr):
    """Bring the parts of acc from `add_values` to plain units and add the sums of offsets."""
    CUT: tl.constexpr = VALUES.cut
    RUNS: tl.constexpr = len(CUT.parts) // len(CUT.chunks)
    new = ()
    for p in tl.static_range(len(acc)):
        part = acc[p]
        if VALUES.fold == "token":
            part = part * (1.0 / _unit_of(p % RUNS, VALUES))
            if VALUES.code == "unsigned":
                o = _offset_of(offsets, CUT.parts[p].place // VALUES.group, VALUES)
                part += (o * (VALUES.offset / 2.0**VALUES.lift))[None, :]
        new = new + (part,)
    return new


@triton.jit
def _offset_of(sums, GROUP: tl.constexpr, VALUES: tl.constexpr):
    """Return the sum of weight * offset [columns] of channel group GROUP."""
    if VALUES.by_rows:
        x = tl.where((tl.arange(0, ROWS) == GROUP)[:, None], sums[0], 0.0)
    else:
        x = sums[GROUP]
    return tl.sum(x, 0)
