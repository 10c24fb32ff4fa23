"""`PlanConfig`: print the plan of a run instead of running it."""

from dataclasses import dataclass

from .option import option


@dataclass(frozen=True)
class PlanConfig:
    """`--dry-run` needs no GPU, no other process and no data, and writes nothing."""

    dry_run: str = option(
        "off", choices=("off", "cuda", "cpu"), alone="cuda", switches={"--no-dry-run": "off"},
        help="Print the plan and exit: layout, schedule, memory and traffic of a rank, FLOPs; or the errors of a "
             "launch. cuda, "
        "cpu: the kind of device to plan for. The flag without a value means cuda.")
    world_size: int | None = option(None, at_least=1, unit="ranks", help="Number of ranks to plan for (--dry-run only). "
                                    "Default: the launcher's, else 1.",
                                    avoid="In real runs the launcher sets it.")
    rank: int = option(0, at_least=0, help="The rank whose memory and traffic are printed (--dry-run only).",
                       avoid="In real runs the launcher sets it.")

    @property
    def is_dry(self) -> bool:
        return self.dry_run != "off"
