"""Write docs/reference/flags.md from the declarations in megatron_ds/config.

python tools/write_flags_doc.py            write the file
python tools/write_flags_doc.py --check    exit with code 1 if the file is out of date; write nothing
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.compat.config.deepspeed_json import TRANSLATED  # noqa: E402
from megatron_ds.compat.config.dialects import DIALECTS  # noqa: E402
from megatron_ds.compat.config.unsupported import FAMILIES, FLAGS, KEYS, Answer  # noqa: E402
from megatron_ds.config.messages import needed  # noqa: E402
from megatron_ds.config.options.option import Option  # noqa: E402
from megatron_ds.config.run import options_in, sections  # noqa: E402
from megatron_ds.config.sources.config_files import declared_keys  # noqa: E402
from megatron_ds.config.sources.config_text import default_text, invocation, title_of  # noqa: E402

INTRO = """# Flags

<!-- Made by tools/write_flags_doc.py from megatron_ds/config. Change the declarations there, then run it. -->

Every option can be given in three ways:

* as a flag, in any spelling below; hyphens and underscores are the same, and so are `--lr 1e-4` and
  `--lr=1e-4`;
* in a YAML file, `--config run.yaml` (several are allowed): by its name, bare or inside its section. A
  checkpoint's `run.json` is such a file too, and repeats its run;
* in a DeepSpeed JSON, `--deepspeed_config ds.json`, if a key is listed for it below. `"auto"` means: take the
  value from the flags.

```yaml
model:
  num_layers: 12
  hidden_size: 768
optimizer:
  lr: 6e-4
train_iters: 1000
```

Flags override files. It is an error if two files give one option different values, or if a name is unknown.
All errors of a command line and its files are reported at once. Startup prints every value that is not the
default, with its source.

`--help` prints all flags, `--version` the versions of megatron_ds, torch and Python, and `--print-config` the
complete configuration as YAML that `--config` reads, with the source of each value. Each exits without
starting the run. `--local-rank N`, which `torch.distributed.launch` and DeepSpeed's launcher append, is
accepted; the launcher's environment sets the rank."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with code 1 if the file is out of date",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs" / "reference" / "flags.md",
        help="file to write (default: %(default)s)",
    )
    args = parser.parse_args()
    text = flags_document()
    if args.check:
        stale = (
            not args.output.is_file() or args.output.read_text(encoding="utf-8") != text
        )
        print(
            f"{args.output} is "
            f"{'out of date: run python tools/write_flags_doc.py' if stale else 'up to date'}"
        )
        return int(stale)
    args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}")
    return 0


def flags_document() -> str:
    """The whole page."""
    parts = [INTRO]
    for section in sections():
        rows = [_row(option) for option in options_in(section)]
        parts += [
            f"\n## {title_of(section)} (`{section}:`)\n",
            *_table(("Flag", "Default", "Meaning", "Needs", "Advice"), rows),
        ]
    parts += ["\n## DeepSpeed keys\n", *_table(("Key", "Option"), _keys())]
    parts += [
        "\n## Names of Megatron's forks\n",
        *_table(("Flag", "Meaning here", "Fork"), _names_of_forks()),
    ]
    parts += [
        "\n## Flags of Megatron without an option\n",
        WITHOUT_OPTION,
        *_answers(
            {**FLAGS, **{f"{start}…": answer for start, answer in FAMILIES.items()}},
            "Flag",
        ),
    ]
    parts += [
        "\n## DeepSpeed keys without an option\n",
        "The same for the JSON. Each key covers the block under it. A value that switches the feature "
        "off is accepted.\n",
        *_answers(KEYS, "Key"),
    ]
    return "\n".join(parts) + "\n"


WITHOUT_OPTION = """A flag is accepted, and listed at startup, if it changes nothing: it requests what always
happens, or it chooses an implementation that cannot change any number. A flag is refused if the run would
differ from what it requests.
"""


def _answers(table: Mapping[str, Answer], head: str) -> Iterator[str]:
    rows = []
    for name, answer in sorted(table.items()):
        values = (
            []
            if not answer.values
            else [
                str(value).lower()
                for value in answer.values
                if value not in (None, "auto")
            ]
        )
        if answer.values is None or not answer.refusal:
            accepted = answer.note
            refused = ""
        else:
            listed = ", ".join(f"`{value}`" for value in values if value != "false")
            accepted = f"{listed}: {answer.note}" if listed else ""
            refused = answer.refusal
        rows.append((f"`{name}`", accepted, refused))
    return _table((head, "Accepted, because", "Refused, because"), rows)


def _row(option: Option) -> tuple[str, ...]:
    flags = "<br>".join(f"`{spelling}`" for spelling in _spellings(option))
    default = "required" if option.required else default_text(option)
    return (
        flags,
        f"`{default}`" if default and not option.required else default,
        option.help,
        " or ".join(f"`{flag}`" for flag in needed(option.needs))
        if option.needs
        else "",
        option.avoid,
    )


def _spellings(option: Option) -> list[str]:
    if option.choices:  # the braces of the choices hold commas
        choices = "{" + ",".join(map(str, option.choices)) + "}"
        if option.alone is not None:
            choices = f"[{choices}]"
        return [f"{flag} {choices}" for flag in (option.flag, *option.flags)] + list(
            option.switches
        )
    return invocation(option).split(", ")


def _names_of_forks() -> Iterator[tuple[str, ...]]:
    for dialect in DIALECTS:
        for name, meaning in dialect.names.items():
            yield f"`{name}`", f"`{meaning}`", dialect.project
        yield from _readers(dialect.readers, dialect.project)


def _readers(readers: Mapping[str, tuple], project: str) -> Iterator[tuple[str, ...]]:
    for name, (option, read) in readers.items():
        given = getattr(read, "args", ({},))[0]
        values = given if isinstance(given, Mapping) else {}
        for value, meaning in values.items():
            yield (
                f"`{name} {value}`",
                f"`{meaning}`" if meaning else "the default",
                project,
            )
        if not values:
            yield f"`{name}`", f"`{option}`, in another form", project


def _keys() -> Iterator[tuple[str, str]]:
    keys = {key: f"`{option.flag}`" for key, option in declared_keys().items()}
    keys |= {key: option.help for key, option in TRANSLATED.items()}
    for key, meaning in sorted(keys.items()):
        yield f"`{key}`", meaning


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    sys.exit(main())
