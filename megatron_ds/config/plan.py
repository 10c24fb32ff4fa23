"""`PlanConfig`: to look at a run instead of running it."""

from dataclasses import dataclass

from .option import option


@dataclass(frozen=True)
class PlanConfig:
    """`--dry-run` needs no GPU, no other process, no data, and writes nothing."""

    dry_run: str = option(
        "off", choices=("off", "cuda", "cpu"), alone="cuda", switches={"--no-dry-run": "off"},
        help="Say what the run would be, and end: layout, schedule, bytes and traffic of a rank, FLOPs; or the errors that a "
        "launch would meet. cuda, cpu: the devices it is planned for. The flag alone means cuda.")
    world_size: int | None = option(None, at_least=1, unit="ranks", help="How many ranks there would be (--dry-run only). "
                                    "Default: as many as the launcher says, else 1.",
                                    avoid="In a run the launcher says it.")
    rank: int = option(0, at_least=0, help="The rank whose modules are built and whose bytes are told (--dry-run only).",
                       avoid="In a run the launcher says it.")

    @property
    def is_dry(self) -> bool:
        return self.dry_run != "off"
