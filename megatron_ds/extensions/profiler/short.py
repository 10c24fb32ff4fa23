"""`short`: a count for people."""

UNITS = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
)


def short(number: float) -> str:
    """Return the count with three digits and its unit: 1.31 G."""
    for size, letter in UNITS:
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "
