"""`init_inference` and the engine it returns: a model that computes with divided or stored weights."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...compat.config.deepspeed_json import load_json
from ...errors import ArgumentError, CallError, ConfigError
from ...mpu.agree import on_all_ranks
from ...mpu.collectives import all_gather_object
from ...mpu.group import Group, solo
from ...mpu.host_reads import read_number
from ...mpu.mesh import default_device
from ...mpu.stuck_ranks import doing
from ..deepspeed.external_groups import group_of, join_world, tensor_parallel_group
from ..division.adapted_layers import has_adapters
from ..division.layer_specs import division_of
from ..division.split_layers import split
from ..division.split_plan import Division, plan_of
from ..division.split_proof import require_same_results, results_of
from ..engine.engine import show
from .settings import (
    WITHOUT_EFFECT,
    InferenceSettings,
    read_inference_settings,
)
from .stored_weights import store
from .whole_checkpoint import load_whole


@doing("init_inference")
def init_inference(
    model: nn.Module,
    config: Mapping[str, Any] | str | os.PathLike | None = None,
    **options: Any,
) -> "InferenceEngine":
    """Return an engine that computes with `model`. Collective over the tensor-parallel ranks.

    config   DeepSpeed's inference config, as a dict or the path of a JSON file
    options  keys of the config as arguments; docs/use/inference_engine.md lists the keys

    Takes over the module, in place: its parameters become this rank's part, in the format of the config (by
    default torch.half), on this rank's device. Raises one ConfigError with all problems of the keys, or where the
    model cannot be divided over the ranks.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is {type(model).__name__}, not a torch module: give the model itself, such as pipeline.model."
        )
    settings = read_inference_settings(_block_of(config), options)
    group = _group_of(settings)
    # The results of the whole model are kept for a comparison with those of the divided one.
    division, whole = on_all_ranks(group, lambda: _prepare(model, settings, group))
    if group.size > 1:
        on_all_ranks(group, lambda: split(model, division.plan, group, division.packed))
    if not settings.on_host:
        model.to(default_device())
    require_same_results(model, whole)
    if settings.dtype == torch.int8:
        on_all_ranks(group, lambda: store(model, settings.stored))
    if group.rank == 0:
        _show_unused(settings)
    return InferenceEngine(model, settings, group)


def _block_of(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return load_json(os.fspath(config), "config")
    raise ConfigError(
        f"config is {type(config).__name__}: give a dict of DeepSpeed's inference keys, or the path of a JSON file."
    )


def _group_of(settings: InferenceSettings) -> Group:
    """Return the ranks that share the model. Collective over all ranks where groups must be made."""
    size = settings.tp_size
    if settings.group is not None:
        group = group_of(settings.group)
    elif settings.mpu is not None:
        group = join_world(settings.mpu).model
    elif size is None or size == 1:
        return solo("tp")
    else:
        return tensor_parallel_group(size)
    if size is not None and size != group.size:
        raise ConfigError(
            f'init_inference: "tensor_parallel.tp_size" is {size}, and the group of the mpu has {group.size} ranks. '
            "Give the size of the group, or leave it out."
        )
    return group


def _prepare(
    model: nn.Module, settings: InferenceSettings, group: Group
) -> tuple[Division, torch.Tensor | None]:
    """Return (the division, results to compare with), of a model with its weights in their format."""
    if settings.checkpoint is not None:
        load_whole(model, settings.checkpoint, settings.base_dir)
    lacking = [name for name, p in model.named_parameters() if p.is_meta]
    if lacking:
        raise ConfigError(
            f"{len(lacking)} parameters of {type(model).__name__} are on the meta device, such as {lacking[0]}. Give "
            "checkpoint=, a folder or JSON with their files."
        )
    model.eval()
    if settings.dtype != torch.int8:
        model.to(settings.dtype)
    if group.size == 1 and settings.policy is None:
        return Division({}, {}), None
    division = _division_of(model, settings, group.size)
    return division, results_of(model) if group.size > 1 else None


def _division_of(model: nn.Module, settings: InferenceSettings, ranks: int) -> Division:
    if settings.policy is None:
        return division_of(model, None, ranks)
    if has_adapters(model):
        raise ConfigError(
            f"injection_policy has names of layers, of which {type(model).__name__} has others by its adapters. Leave "
            "it out, or merge the adapters (merge_and_unload)."
        )
    return Division(plan_of(model, settings.policy, ranks), {})


def _show_unused(settings: InferenceSettings) -> None:
    for key in settings.unused:
        show(f'init_inference: "{key}" has no effect: {WITHOUT_EFFECT[key]}.')


class InferenceEngine(nn.Module):
    """A model for inference, under its own attributes: `engine(…)`, `engine.generate(…)`, `engine.config`.

    module    the model
    settings  the config
    group     the ranks that share the model; all call the engine together, with the same inputs
    """

    def __init__(self, module: nn.Module, settings: InferenceSettings, group: Group):
        super().__init__()
        self.module = module
        self.settings = settings
        self.group = group
        self._times: list[float] | None = None
        self.eval()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the module's result, without gradients. Collective over `group`."""
        self._require_same_inputs(inputs, options)
        began = self._now()
        with torch.no_grad():
            output = self.module(*inputs, **options)
        if self._times is not None:
            self._times.append(self._now() - began)
        return output

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """transformers' `generate`. Collective over `group`, whose ranks draw the same samples.

        Raises CallError for a prompt longer than max_out_tokens, or where ranks have different inputs.
        """
        self._require_same_inputs(inputs, options)
        ids = inputs[0] if inputs else options.get("input_ids", options.get("inputs"))
        most = self.settings.max_out_tokens
        if torch.is_tensor(ids) and ids.dim() == 2 and ids.shape[1] > most:
            raise CallError(
                f"the prompt has {ids.shape[1]} tokens, and max_out_tokens is {most}. Give init_inference "
                f"max_out_tokens={ids.shape[1]} or more."
            )
        if self.group.size > 1:
            drawn = int(torch.randint(2**62, ()))
            torch.manual_seed(all_gather_object(drawn, self.group)[0])
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise CallError(
                f"{type(self.module).__name__} has no method generate. Give init_inference a model of transformers, or "
                "call the engine for the outputs of the module."
            )
        return generate(*inputs, **options)

    def _require_same_inputs(self, inputs: Any, options: Any) -> None:
        """Raises CallError, on all ranks, unless the tensors of the arguments are alike on all of them."""
        if self.group.size == 1:
            return
        tensors = [v for v in (*inputs, *options.values()) if torch.is_tensor(v)]
        own = [
            (tuple(t.shape), read_number(t.double().sum(), self.group)) for t in tensors
        ]
        found = all_gather_object(own, self.group)
        if any(theirs != found[0] for theirs in found):
            shapes = [[shape for shape, _ in theirs] for theirs in found]
            raise CallError(
                f"the {self.group.size} tensor-parallel ranks compute with one input, but they were given different "
                f"ones (shapes {shapes}). Give all of them the same tensors."
            )

    # ------------------------------------------------------------------ DeepSpeed's further names
    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each following forward, for `model_times`."""
        self._times = []

    def model_times(self) -> list[float]:
        """Return the seconds of the forwards since the last call. Raises CallError without `profile_model_time`."""
        if self._times is None:
            raise CallError(
                "engine.model_times() before engine.profile_model_time(): nothing is measured. Call it first."
            )
        times = self._times
        self._times = []
        return times

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the module with torch.compile."""
        self.module.compile(*args, **options)

    def destroy(self) -> None:
        """No effect: the engine holds nothing but the module."""

    def _now(self) -> float:
        if self._times is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    # ------------------------------------------------------------------ as the module
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"neither the engine nor its module, {type(module).__name__}, has an attribute {name!r}"
                ) from None
            return getattr(module, name)


def default_inference_config() -> dict[str, Any]:
    """Return the keys of `init_inference` with the values that they have where they are left out."""
    defaults = InferenceSettings()
    return {
        "dtype": defaults.dtype,
        "tensor_parallel": {"tp_size": 1},
        "injection_policy": None,
        "checkpoint": None,
        "base_dir": "",
        "quant": {"weight": {"num_bits": 8, "q_groups": None}},
        "max_out_tokens": defaults.max_out_tokens,
        "replace_with_kernel_inject": False,
        "enable_cuda_graph": False,
        "keep_module_on_host": False,
    }
