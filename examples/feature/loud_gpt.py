"""A feature of megatron_ds with one of each part. Copy the folder, and keep what you need.

pip install .                                    then every command knows it
megatron-ds train --import loud_gpt …            or without installing, in the folder of this file
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_ds.commands import Command
from megatron_ds.config.options.option import option
from megatron_ds.features import Feature, MetricSink, Objective
from megatron_ds.models import MODELS, gpt_layers, language_model
from megatron_ds.training.observer import Observer


@MODELS.register("loud-gpt")
@language_model  # the inputs and the loss of a GPT
def loud_gpt(config, ctx):
    """Return the layers of a GPT with twice the embedding."""
    first, *others = gpt_layers(config, ctx)
    return [replace(first, make=partial(Loud, first.make)), *others]


def Loud(make):
    """Build the first layer, and double its output."""
    layer = make()
    layer.register_forward_hook(lambda module, inputs, hidden: 2 * hidden)
    return layer


@dataclass(frozen=True)
class LoudOptions:
    """The section `loud` of the configuration. Each field is a flag, a key of YAML and a row of --help."""

    loud_scale: float = option(1.0, help="Factor of the loss.", above=0)
    loud_file: str | None = option(
        None, help="File that gets a line of JSON for each record. Default: none."
    )


def scale_is_moderate(config):
    """Yield the problems of a configuration."""
    if config.of(LoudOptions).loud_scale > 100:
        yield "[loud_scale] is above 100, where fp16 overflows. Use a smaller one."


def scaled_loss(config, mesh):
    """Return the loss of the model, multiplied."""
    scale = config.of(LoudOptions).loud_scale
    model = partial(
        MODELS[config.model.model].loss,
        tp=mesh.group("tp"),
        vocab_size=config.model.vocab_size,
    )

    def loss(output, batch):
        found = model(output, batch)
        return replace(found, objective=scale * found.objective)

    return loss


class LoudFile:
    """A sink: receives the records of the log on rank 0."""

    def __init__(self, config, run_id):
        self.place = Path(config.of(LoudOptions).loud_file)

    def write(self, record):
        with open(self.place, "a") as file:
            file.write(json.dumps({"step": record.step, "loss": record.loss}) + "\n")


class Steps(Observer):
    """An observer: its methods are called at the moments of a run, on every rank."""

    def __init__(self, config):
        self.first = config.of(LoudOptions).loud_scale

    def run_ended(self, reason):
        print(f"loud: {reason}, with a scale of {self.first}")


def count(argv):
    """The command `megatron-ds loud-count FILE`: count the lines that a run wrote."""
    print(len(Path(argv[0]).read_text().splitlines()), "records")
    return 0


FEATURES = [
    Feature(
        "loud",
        title="Loud GPT",
        options=LoudOptions,
        rules=[scale_is_moderate],
        objective=Objective(
            is_on=lambda config: config.of(LoudOptions).loud_scale != 1.0,
            loss=scaled_loss,
        ),
        sinks=[
            MetricSink(
                is_on=lambda config: config.of(LoudOptions).loud_file is not None,
                make=LoudFile,
            )
        ],
        commands={"loud-count": Command("loud_gpt", "count records", "count")},
        observers=[Steps],
    )
]
