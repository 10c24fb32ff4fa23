"""Rules about random-LTD: which blocks drop tokens, and how many they may keep."""

from collections.abc import Iterator

from ..token_drop import dropping_blocks
from .messages import flag, neighbours, say
from .run import RunConfig, all_options

ON, IDS, LEAST = "routing.random_ltd", "routing.random_ltd_layer_ids", "routing.random_ltd_min_tokens"
MOST, STEPS, MULTIPLE = "routing.random_ltd_max_tokens", "routing.random_ltd_steps", "routing.random_ltd_tokens_per_step"
TOTAL = "routing.random_ltd_total_layers"
LENGTH, TP = "model.seq_length", "parallel.tensor_model_parallel_size"


def unused(config: RunConfig) -> Iterator[str]:
    if not config.routing.random_ltd:
        for path, option in all_options().items():
            if path.startswith("routing.random_ltd_") and config.get(path) != option.default:
                yield f"{say(config, path)} has no effect without {flag(ON)}. Add that, or remove this."


def schedule(config: RunConfig) -> Iterator[str]:
    routing, length = config.routing, config.model.seq_length
    if not routing.random_ltd:
        return
    for path in (LEAST, STEPS):
        if config.get(path) is None:
            yield f"{say(config, ON)} needs {flag(path)}: {all_options()[path].help}"
    least, multiple = routing.random_ltd_min_tokens, routing.random_ltd_tokens_per_step
    most = routing.random_ltd_max_tokens or length
    if length and most and most > length:
        yield (f"{say(config, MOST)} is more than {say(config, LENGTH)}. Use {length} or less, or remove it to keep all "
               "tokens in the end.")
    if least and most and least > most:
        yield (f"{say(config, LEAST)} is more than the {most} tokens kept in the end, but the number only grows. Use "
               f"{flag(LEAST)} {most} or less.")
    elif least and least < multiple and least != most:
        yield (f"{say(config, LEAST)} is less than {say(config, MULTIPLE)}: rounded down to a multiple of that, no token "
               f"would be kept at first. Use {flag(LEAST)} {multiple} or more, or {flag(MULTIPLE)} {least} or less.")


def blocks(config: RunConfig) -> Iterator[str]:
    routing, layers = config.routing, config.model.num_layers
    if not routing.random_ltd or not layers:
        return
    ids, total = routing.random_ltd_layer_ids, routing.random_ltd_total_layers
    if total is not None and total != layers:
        yield f"{say(config, TOTAL)}, but {say(config, 'model.num_layers')}. Make them equal, or remove the first."
    outside, twice = sorted({i for i in ids if i >= layers}), sorted({i for i in ids if ids.count(i) > 1})
    if outside:
        yield (f"{say(config, IDS)}: there is no block {', '.join(map(str, outside))} among {layers}, numbered from 0. "
               f"Use numbers up to {layers - 1}.")
    if twice:
        yield f"{say(config, IDS)} names {', '.join(map(str, twice))} twice. Name each block once."
    if not dropping_blocks(routing, layers):
        yield (f"{say(config, ON)} with {say(config, 'model.num_layers')}: no block remains besides the first and the last to "
               f"drop tokens. Choose blocks with {flag(IDS)}.")


def sequence_parallel(config: RunConfig) -> Iterator[str]:
    """Each rank holds an equal part of the kept tokens."""
    routing, t, length = config.routing, config.parallel.tensor_model_parallel_size, config.model.seq_length
    if not routing.random_ltd or not config.parallel.sequence_parallel or t == 1 or not length:
        return
    most, multiple = routing.random_ltd_max_tokens or length, routing.random_ltd_tokens_per_step
    why = f"{say(config, TP)}: with --sequence-parallel each rank holds an equal part of the kept tokens"
    if multiple % t and routing.random_ltd_min_tokens != most:
        yield f"{say(config, MULTIPLE)} is not a multiple of {why}. Use {flag(MULTIPLE)} {neighbours(multiple, t)}."
    if most < length and most % t:
        yield f"{say(config, MOST)} is not a multiple of {why}. Use {flag(MOST)} {neighbours(most, t)}."


ROUTING_RULES = (unused, schedule, blocks, sequence_parallel)
