"""Options of the section `plan_time`."""

from dataclasses import dataclass

from ...config.options.option import option


@dataclass(frozen=True)
class PlanTimeConfig:
    """`--plan-time` adds seconds to what --dry-run prints."""

    plan_time: bool = option(
        False,
        help="Print seconds of a step, FLOP/s and MFU, days and cost of the planned training, and what a step is "
        "spent on (--dry-run only).",
        avoid="Without --cluster there is no device whose speed is known.",
    )
    cluster: str | None = option(
        None,
        help="Devices and links to plan the time of: a file of YAML, or one of the package, such as a100-80g. "
        "Also the memory of the devices, unless --device-memory is given.",
        avoid="Real runs measure their own time.",
    )
    plan_json: str | None = option(
        None,
        help="File for the planned seconds, shares and memory, as JSON (--plan-time only).",
        avoid="Without it the numbers are printed alone.",
    )
