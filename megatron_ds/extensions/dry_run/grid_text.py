"""The part of a dry run's text about the grid: sizes of its axes, and the groups of one rank.

grid: 8 ranks = tensor 2 × pipeline 2 × data 2, order tp-cp-ep-dp-pp; rank 5 is tp 1, pp 1, dp 0
  group                  size  groups  of rank 5
  tensor (tp)               2       4  4, 5
  pipeline (pp)             2       4  1, 5
  …
  ranks of each tensor group, [ ] holds rank 5:
            dp 0    dp 1
    pp 0   0, 1    2, 3
    pp 1  [4, 5]   6, 7
"""

from collections.abc import Iterator, Sequence

from ...mpu.grid import Grid, ranks_in_short
from ...planning.run_plan import ties_ends
from .plan_tables import table
from .world_plan import WorldPlan

AXES = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "dp": "data",
}


def is_tied(plan: WorldPlan) -> bool:
    """Return whether the first and the last stage share the embedding and are on different ranks."""
    # Stage → pipeline rank.
    placement = plan.run.shape.placement
    return ties_ends(plan.config) and placement[0] != placement[-1]


def grid_text(
    grid: Grid, rank: int, tied: bool, experts: bool = False
) -> Iterator[str]:
    """Sizes of the mesh, and the groups of one rank.

    tied     whether the embedding has a group
    experts  whether the model has any
    """
    # A single context-parallel rank is not worth a word.
    at = grid.coordinates(rank)
    axes = dict(AXES)
    if grid.cp == 1:
        del axes["cp"]
    where = ", ".join(f"{axis} {at[axis]}" for axis in axes)
    sizes = " × ".join(f"{name} {grid.size(axis)}" for axis, name in axes.items())
    noun = "ranks" if grid.world_size > 1 else "rank"
    yield (
        f"grid: {grid.world_size:,} {noun} = {sizes}, "
        f"order {grid.order}; rank {rank} is {where}"
    )
    # Groups of absent features have no row.
    names = {}
    for axis, noun in axes.items():
        if axis != "dp":
            names[axis] = f"{noun} ({axis})"
    names["dp-cp"] = "data (dp-cp)"
    names["tp-pp"] = "model (tp-pp)"
    if experts and grid.folds:
        names["etp"] = "expert tensor (etp)"
    if experts:
        names["ep"] = "expert (ep)"
        names["edp"] = "expert data (edp)"
    rows = [["group", "size", "groups", f"of rank {rank}"]]
    for name, title in names.items():
        ranks = grid.group_of(rank, *name.split("-"))
        count = grid.world_size // len(ranks)
        rows.append(_group_row(title, ranks, count))
    if tied:
        # Each pipeline has one such group.
        ranks = next(g for g in grid.embedding_groups() if rank in g)
        count = grid.world_size // grid.pp
        rows.append(_group_row("tied embedding (embd)", ranks, count))
    yield from table(rows, last_left=True)
    # A picture of a single tensor group shows nothing.
    if grid.pp * grid.dp * grid.cp > 1:
        yield f"  ranks of each tensor group, [ ] holds rank {rank}:"
        yield from _picture(grid, at)


def _group_row(title: str, ranks: Sequence[int], count: int) -> list[str]:
    """Return the row of a group: its ranks, and how many such groups there are."""
    return [
        title,
        str(len(ranks)),
        f"{count:,}",
        ranks_in_short(ranks),
    ]


def _picture(grid: Grid, at: dict[str, int]) -> list[str]:
    """Return the tensor groups: a row for each pipeline rank, a column for each data- and context-parallel rank."""
    # Large grids have gaps.
    own = at["dp"] * grid.cp + at["cp"]
    columns = _some(grid.dp * grid.cp, own, 5)
    names = ["dp", "cp"] if grid.cp > 1 else ["dp"]
    places: dict[int, dict[str, int]] = {}
    header = [""]
    for i in columns:
        if i is None:
            header.append("…")
            continue
        dp, cp = divmod(i, grid.cp)
        places[i] = {"dp": dp, "cp": cp}
        header.append(" ".join(f"{axis} {places[i][axis]}" for axis in names))
    rows = [header]
    # The group of the planned rank is in brackets.
    for pp in _some(grid.pp, at["pp"], 5):
        if pp is None:
            rows.append(["…"])
            continue
        row = [f"pp {pp}"]
        for i in columns:
            if i is None:
                row.append(" … ")
                continue
            place = {"pp": pp, **places[i]}
            first = grid.rank_of(**place)
            text = ranks_in_short(grid.group_of(first, "tp"))
            is_here = place.items() <= at.items()
            row.append(f"[{text}]" if is_here else f" {text} ")
        rows.append(row)
    return table(rows, indent="    ")


def _some(count: int, must: int, most: int) -> list[int | None]:
    """Return 0 to `count` - 1; if these are more than `most`, the first two, `must` and the last. None is a gap."""
    chosen: Sequence[int] = range(count)
    if count > most:
        chosen = sorted({0, 1, must, count - 1})
    # A gap stands between numbers that do not follow each other.
    result: list[int | None] = []
    for number in chosen:
        follows = not result or result[-1] == number - 1
        if not follows:
            result.append(None)
        result.append(number)
    return result
