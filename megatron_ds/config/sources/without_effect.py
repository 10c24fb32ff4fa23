"""Accepted flags and keys that change nothing, as startup lists them."""

from ..run import RunConfig

WIDEST = 48  # widest column; longer values are not aligned


def report_without_effect(config: RunConfig) -> str:
    """Return a list of accepted flags and keys that change nothing, by reason. Empty if there are none.

    accepted, nothing to do:
      --use-flash-attn, --transformer-impl    kernels are chosen by what the device supports
    """
    if not config.without_effect:
        return ""
    names: dict[str, str] = {}
    for name, why in config.without_effect.items():
        names[why] = f"{names[why]}, {name}" if why in names else name
    width = min(WIDEST, max(map(len, names.values())))
    rows = [f"  {listed.ljust(width)}  {why}" for why, listed in names.items()]
    return "\n".join(["accepted, nothing to do:", *rows])
