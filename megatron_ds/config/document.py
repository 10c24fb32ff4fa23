"""docs/flags.md, made from the same declarations as the flags. `tools/write_flags_doc.py` writes it; a test compares it."""

from collections.abc import Iterable, Iterator, Mapping

from .deepspeed_data_efficiency import MEANINGS
from .deepspeed_json import TRANSLATED, declared_keys
from .help import TITLES, default_text, invocation
from .option import Option
from .run import SECTIONS, all_options
from .unsupported import FAMILIES, FLAGS, KEYS, Answer

INTRO = """# Flags

<!-- Made by tools/write_flags_doc.py from megatron_ds/config. Change the declarations there, then run it. -->

Every option can be given in three ways:

* as a flag, in any spelling below; hyphens and underscores are the same, and so are `--lr 1e-4` and `--lr=1e-4`;
* in a YAML file, `--config run.yaml` (several are allowed): by its name, bare or inside its section. A checkpoint's `run.json`
  is such a file too, and repeats its run;
* in a DeepSpeed JSON, `--deepspeed_config ds.json`, if a key is listed for it below. `"auto"` means: take it from the flags.

```yaml
model:
  num_layers: 12
  hidden_size: 768
optimizer:
  lr: 6e-4
train_iters: 1000
```

Flags override files. It is an error if two files give one option different values, or if a name is unknown. All errors of a
command line and its files are reported at once. Startup prints every value that is not the default, with its source.

`--help` prints all flags, `--version` the versions of megatron_ds, torch and Python, and `--print-config` the complete
configuration as YAML that `--config` reads, with the source of each value. Each exits without starting the run.
`--local-rank N`, which `torch.distributed.launch` and DeepSpeed's launcher append, is accepted; the launcher's environment
sets the rank."""

TRANSLATIONS = {
    "fp16.loss_scale": "`--loss-scale`; 0 is dynamic",
    "fp16.initial_scale_power": "`--initial-loss-scale`, 2 to this power",
    "optimizer.type": "`--optimizer`: Adam and AdamW (both with decoupled weight decay), SGD",
    "optimizer.params.betas": "`--adam-beta1`, `--adam-beta2`",
    "scheduler.type": "`--lr-decay-style`: WarmupLR, WarmupDecayLR, WarmupCosineLR",
    "scheduler.params.warmup_type": "`--lr-warmup-style`; log unless given",
    "scheduler.params.warmup_min_lr": "`--lr-warmup-init`",
    "scheduler.params.warmup_max_lr": "`--lr`",
    "scheduler.params.warmup_num_steps": "`--lr-warmup-iters`; 1000 unless given",
    "scheduler.params.total_num_steps": "`--lr-decay-iters`",
    "scheduler.params.warmup_min_ratio": "`--lr-warmup-init`, as a fraction of the learning rate",
    "scheduler.params.cos_min_ratio": "`--min-lr`, as a fraction of the learning rate; 0.0001 unless given",
    "data_efficiency.data_routing.enabled": "whether the block is used",
    "data_efficiency.data_routing.random_ltd.enabled": "`--random-ltd`, if the blocks around it are enabled, too",
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_num": "must be the number of `random_ltd_layer_id`",
    "data_efficiency.data_routing.random_ltd.model_type": "decoder or encoder: masks follow from the model",
    "data_efficiency.data_routing.random_ltd.model_mask_name": "attention_mask, the only one there is",
    "data_efficiency.data_routing.random_ltd.hidden_state_order": "seq_batch_dim, the only one there is",
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_type": "fixed_linear, the only one there is",
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled": "must be false, as in DeepSpeed",
    "tensorboard.enabled": "whether the block is used",
    "tensorboard.output_path": "`--tensorboard-dir`, together with the job name",
    "tensorboard.job_name": "the directory under the output path",
    **MEANINGS,
}


def flags_document() -> str:
    """The whole page."""
    parts = [INTRO]
    for section in SECTIONS:
        rows = [_row(option) for option in all_options().values() if option.section == section]
        parts += [f"\n## {TITLES[section]} (`{section}:`)\n", *_table(("Flag", "Default", "Meaning", "Advice"), rows)]
    parts += ["\n## DeepSpeed keys\n", *_table(("Key", "Option"), _keys())]
    parts += ["\n## Flags of Megatron without an option\n", WITHOUT_OPTION, *_answers({
        **FLAGS, **{f"{start}…": answer for start, answer in FAMILIES.items()}}, "Flag")]
    parts += ["\n## DeepSpeed keys without an option\n",
              "The same for the JSON. Each key covers the block under it. A value that switches the feature off is "
              "accepted.\n",
              *_answers(KEYS, "Key")]
    return "\n".join(parts) + "\n"


WITHOUT_OPTION = """A flag is accepted, and listed at startup, if there is nothing to do for it: it asks for what always
happens, or it chooses an implementation that cannot change any number. A flag is refused if the run would differ from what it
asks for.
"""


def _answers(table: Mapping[str, Answer], head: str) -> Iterator[str]:
    rows = []
    for name, answer in sorted(table.items()):
        values = [] if not answer.values else [str(value).lower() for value in answer.values if value not in (None, "auto")]
        if answer.values is None or not answer.refusal:
            accepted, refused = answer.note, ""
        else:
            listed = ", ".join(f"`{value}`" for value in values if value != "false")
            accepted, refused = f"{listed}: {answer.note}" if listed else "", answer.refusal
        rows.append((f"`{name}`", accepted, refused))
    return _table((head, "Accepted, because", "Refused, because"), rows)


def _row(option: Option) -> tuple[str, ...]:
    flags = "<br>".join(f"`{spelling}`" for spelling in _spellings(option))
    default = "required" if option.required else default_text(option)
    return flags, f"`{default}`" if default and not option.required else default, option.help, option.avoid


def _spellings(option: Option) -> list[str]:
    if option.choices:                                       # the braces of the choices hold commas
        choices = "{" + ",".join(map(str, option.choices)) + "}"
        if option.alone is not None:
            choices = f"[{choices}]"
        return [f"{flag} {choices}" for flag in (option.flag, *option.flags)] + list(option.switches)
    return invocation(option).split(", ")


def _keys() -> Iterator[tuple[str, str]]:
    keys = {key: f"`{option.flag}`" for key, option in declared_keys().items()}
    assert set(TRANSLATIONS) == set(TRANSLATED), "a translated key has no line here"
    for key, meaning in sorted({**keys, **TRANSLATIONS}.items()):
        yield f"`{key}`", meaning


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
