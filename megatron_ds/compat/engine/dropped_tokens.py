"""Random-LTD in an engine: layers of the program's module that see some of the tokens of each sample.

    engine = convert_to_random_ltd(engine, Block)        after initialize

    hidden states ──┬── kept tokens, in their order ── layer ── written over ──┐
                    └── all ───────────────────────────────────────────────────┴── hidden states

The JSON's block "data_efficiency.data_routing.random_ltd" names the layers by their number among those of the
class, and has the schedule of the number of kept tokens. The layers stay where they are in the module: hooks
choose tokens before a layer and write its output back, so parameters keep their names. (DeepSpeed puts a
module around each layer.) In evaluation, and once all tokens are kept, the hooks do nothing.

The tokens of a layer are a function of the seed, the layer, the micro-batch, the rank of the data and the
sample: a recomputed forward and a resumed run choose the same.

Arguments of a layer besides the hidden states, by name or by position: the mask is cut to the kept tokens, and so
are `POSITIONS` of transformers, whose rotary angles are those of the tokens. A cache of keys is left out, since it
would have some of the tokens. Others are passed as they are.

Yao et al. 2022 (arXiv:2211.11586). Letters: b samples, s positions, k kept tokens, h channels.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from ...config.options.option import shown
from ...errors import ConfigError
from ...features import Provided, missing_wings
from ...ops.keyed_random import random_subset

TOKEN_RISE: Provided[Any] = Provided("token rise")

WHERE = '"data_efficiency.data_routing.random_ltd'
ORDERS = {"batch_seq_dim": 1, "seq_batch_dim": 0}  # → the dimension of positions
MODELS = ("decoder", "encoder")
HIDDEN = "hidden_states"
MASK = "attention_mask"
# Arguments of transformers' layers with a row for each token, [b or 1, s, …] or tuples of such; and their caches.
POSITIONS = ("position_embeddings", "position_ids")
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class RandomLTDSchedule:
    """How many tokens the layers keep: DeepSpeed's schedule, and its count of layer-tokens.

    An update, counted from 0, keeps floor(t / require_steps · (max − min) + min) tokens, rounded down to a
    multiple of seq_per_step, and at most max.
    """

    def __init__(self, block: Mapping[str, Any], global_batch_size: int):
        """block: "random_ltd" of the JSON. Raises ConfigError for missing keys and wrong values."""
        self.layers = _integer(block, "total_layer_num")
        ids = block.get("random_ltd_layer_id")
        self.layer_ids = tuple(sorted(ids or ()))
        self.random_ltd_layer_num = _integer(block, "random_ltd_layer_num")
        if len(self.layer_ids) != self.random_ltd_layer_num:
            raise ConfigError(
                f'{WHERE}.random_ltd_layer_num" is {self.random_ltd_layer_num}, but "random_ltd_layer_id" has '
                f"{len(self.layer_ids)} layers. Make them equal."
            )
        self.global_batch_size = global_batch_size
        self._kept = _rise_of(block)
        self.max_value = self._kept.maximum
        self.min_value = self._kept.minimum
        self.current_value = self.min_value
        self.consumed_layer_tokens = 0
        self.current_steps = -1

    def get_current_seq(self) -> int:
        """Tokens that the layers keep."""
        return self.current_value

    def update_seq(self, global_steps: int) -> None:
        """Set the tokens of an update, counted from 0, and count its layer-tokens once."""
        if self.current_value < self.max_value:
            self.current_value = self._kept.at(global_steps)
        if global_steps != self.current_steps:
            kept = self.current_value * self.random_ltd_layer_num
            whole = self.max_value * (self.layers - self.random_ltd_layer_num)
            self.consumed_layer_tokens += self.global_batch_size * (kept + whole)
            self.current_steps = global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Layer-tokens of the first updates. Counts them, so that it is for planning, as in DeepSpeed."""
        for step in range(train_iters):
            self.update_seq(step)
        return self.consumed_layer_tokens

    def state_dict(self) -> dict[str, int]:
        """Return the state under DeepSpeed's names."""
        return {
            "consumed_layer_tokens": self.consumed_layer_tokens,
            "current_steps": self.current_steps,
            "current_value": self.current_value,
            "min_value": self.min_value,
            "max_value": self.max_value,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a `state_dict`. The smallest and largest number follow the JSON."""
        self.consumed_layer_tokens = state["consumed_layer_tokens"]
        self.current_steps = state["current_steps"]
        self.current_value = min(state["current_value"], self.max_value)


class DroppedTokens:
    """The hooks of one layer.

    number  of the layer among those that drop tokens
    block   "random_ltd" of the JSON
    """

    def __init__(self, engine: Any, number: int, block: Mapping[str, Any]):
        order = block.get("hidden_state_order")
        if order not in ORDERS:
            raise ConfigError(
                f'{WHERE}.hidden_state_order" is {shown(order)}; it must be {" or ".join(ORDERS)}.'
            )
        model = block.get("model_type")
        if model not in MODELS:
            raise ConfigError(
                f'{WHERE}.model_type" is {shown(model)}; it must be {" or ".join(MODELS)}.'
            )
        self.engine = engine
        self.number = number
        self.positions = ORDERS[order]
        self.mask_name = block.get("model_mask_name")
        self._whole: torch.Tensor | None = None
        self._index: torch.Tensor | None = None

    def before(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Choose tokens of the hidden states, the first argument, and of the mask."""
        self._whole = None
        whole = args[0] if args else kwargs[HIDDEN]
        length = whole.shape[self.positions]
        kept = self.engine.random_ltd_scheduler.get_current_seq()
        if not layer.training or kept >= length:
            return None
        index = self._draw(whole, kept, length)
        self._whole = whole
        self._index = _of_channels(index, whole, self.positions)
        part = whole.gather(self.positions, self._index)
        # The arguments of the call with some of the tokens; a positional one has its name from
        # the signature, since BERT's layers take the mask by position.
        names = [*inspect.signature(layer.forward).parameters]
        named = zip_longest(names[1 : len(args)], args[1:], fillvalue="")
        others = [self._part(name, value, index, length) for name, value in named]
        kwargs = {
            name: self._part(name, value, index, length)
            for name, value in kwargs.items()
        }
        if args:
            return (part, *others), kwargs
        return args, kwargs | {HIDDEN: part}

    def _part(self, name: str, value: Any, index: torch.Tensor, length: int) -> Any:
        """Return an argument for the kept tokens, by its name in the layer's forward.

        value   of all tokens, or anything that is not of tokens
        index   int64 [b, k], the kept ones
        length  of all tokens
        Raises ConfigError where that is not known.
        """
        # Keys of some tokens would be wrong for later calls.
        if value is None or name in CACHES:
            return None
        if name == self.mask_name:
            return _masked(value, index, length)
        if name in POSITIONS:
            return _rows(name, value, index, length)
        if name == MASK and length in getattr(value, "shape", ()):
            raise ConfigError(
                f'{WHERE}.model_mask_name" is {shown(self.mask_name)}, but the layer is given a mask of all {length} '
                f"tokens as {MASK}, of which it keeps {index.shape[1]}. Set the key to {MASK!r}."
            )
        return value

    def after(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Write the output, or the first of several, over the chosen tokens."""
        whole = self._whole
        index = self._index
        if whole is None or index is None:
            return None
        self._whole = None
        part = out[0] if isinstance(out, tuple) else out
        joined = whole.to(part.dtype).scatter(self.positions, index, part)
        return (joined, *out[1:]) if isinstance(out, tuple) else joined

    def _draw(self, whole: torch.Tensor, kept: int, length: int) -> torch.Tensor:
        """int64 [b, k], ascending."""
        engine = self.engine
        place = (engine.micro_steps, engine.world.data.rank)
        seed = engine.data_efficiency.seed
        samples = whole.shape[1 - self.positions]
        key = (seed, "random_ltd", self.number, *place)
        keys = [(*key, sample) for sample in range(samples)]
        return random_subset(keys, kept, length, whole.device)


def random_ltd_initialize(engine: Any, layers: Sequence[nn.Module]) -> None:
    """Let the layers that the JSON names drop tokens. layers: all of the class, in the order of the module.

    Raises ConfigError where the JSON has no random-LTD or names layers that there are not.
    """
    block = engine.data_efficiency.random_ltd
    if block is None:
        raise ConfigError(
            'convert_to_random_ltd: the config has no random-LTD. Enable "data_efficiency", its "data_routing" and '
            '"random_ltd" in that.'
        )
    ids = engine.random_ltd_scheduler.layer_ids
    if wrong := [number for number in ids if number not in range(len(layers))]:
        raise ConfigError(
            f'{WHERE}.random_ltd_layer_id" has {wrong[0]}, but the module has {len(layers)} layers of this class, '
            f"with the numbers 0 to {len(layers) - 1}."
        )
    for number in ids:
        hooks = DroppedTokens(engine, number, block)
        layers[number].register_forward_pre_hook(hooks.before, with_kwargs=True)
        layers[number].register_forward_hook(hooks.after, with_kwargs=True)


def schedule_of(wish: Any, global_batch_size: int) -> RandomLTDSchedule | None:
    """Return the schedule of a `DataEfficiency`; None without random-LTD."""
    if wish.random_ltd is None:
        return None
    return RandomLTDSchedule(wish.random_ltd, global_batch_size)


def _of_channels(
    index: torch.Tensor, whole: torch.Tensor, positions: int
) -> torch.Tensor:
    """Return the index [b, k] for `gather` of hidden states [b, s, h], or [s, b, h]."""
    index = index if positions == 1 else index.t()
    for _ in whole.shape[2:]:
        index = index.unsqueeze(-1)
    return index.expand(*index.shape[:2], *whole.shape[2:])


def _rows(name: str, value: Any, index: torch.Tensor, length: int) -> Any:
    """Return the rows [b, k, …] of the chosen tokens, of a tensor [b or 1, s, …] or of several."""
    if isinstance(value, tuple | list):
        return tuple(_rows(name, each, index, length) for each in value)
    batch = len(index)
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) < 2 or shape[0] not in (1, batch) or shape[1] != length:
        raise ConfigError(
            f"random-LTD: a layer is given {name} of shape {list(shape)}. To keep some of {length} tokens it must be "
            f"[{batch} or 1, {length}, …]. Leave the layer out of {WHERE[1:]}.random_ltd_layer_id."
        )
    whole = value.expand(batch, *shape[1:])
    return whole.gather(1, _of_channels(index, whole, 1))


def _masked(mask: Any, index: torch.Tensor, length: int) -> torch.Tensor:
    """Return a mask of the chosen tokens, by all dimensions that have the length: [b, s], [b or 1, n or 1, s
    or 1, s].
    """
    if not isinstance(mask, torch.Tensor):
        raise ConfigError(
            f"random-LTD: the mask of a layer is {type(mask).__name__}, of which no tokens can be chosen. Use an "
            'attention whose mask is a tensor, in transformers attn_implementation="sdpa".'
        )
    batch, kept = index.shape
    mask = mask.expand(batch, *mask.shape[1:])
    last = mask.dim() - 1
    for dim in range(max(1, last - 1), last + 1):
        if mask.shape[dim] != length:
            continue
        # The index along this dimension, the same along the others.
        shape = [1] * mask.dim()
        shape[0] = batch
        shape[dim] = kept
        wanted = list(mask.shape)
        wanted[dim] = kept
        mask = mask.gather(dim, index.view(shape).expand(wanted))
    return mask


def _rise_of(block: Mapping[str, Any]) -> Any:
    """Return the number of tokens as a function of the update. Raises ConfigError for a wrong schedule."""
    schedule = block.get("random_ltd_schedule")
    if not isinstance(schedule, Mapping):
        raise ConfigError(f'{WHERE}.random_ltd_schedule" is missing: give a block.')
    kind = schedule.get("schedule_type")
    if kind != "fixed_linear":
        raise ConfigError(
            f'{WHERE}.random_ltd_schedule.schedule_type" is {shown(kind)}; it must be fixed_linear.'
        )
    inner = schedule.get("schedule_config", {})
    make = TOKEN_RISE.find()
    if make is None:
        raise ConfigError(f"random-LTD is not in this package.{missing_wings()}")
    low = _integer(schedule, "min_value")
    high = _integer(schedule, "max_value")
    if low > high:
        raise ConfigError(
            f'{WHERE}.random_ltd_schedule": min_value {low} is above max_value {high}. Exchange the two.'
        )
    steps = _integer(inner, "require_steps")
    return make(low, high, steps, _integer(inner, "seq_per_step"), lowest=0)


def _integer(block: Any, key: str) -> int:
    value = block.get(key) if isinstance(block, Mapping) else math.nan
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f'{WHERE}": {key} is {shown(value)}; it must be an integer of 1 or more.'
        )
    return value
