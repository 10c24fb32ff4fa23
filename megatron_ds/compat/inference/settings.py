"""The keys of `init_inference`: DeepSpeed's inference config, as a dict, a JSON file or keyword arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...config.sources.reading import reject
from ...registry import did_you_mean

DTYPES = {
    "fp16 float16 half torch.float16 torch.half": torch.float16,
    "fp32 float32 float torch.float32 torch.float": torch.float32,
    "bf16 bfloat16 bfloat torch.bfloat16": torch.bfloat16,
    "int8 torch.int8": torch.int8,
}
SPELLINGS = {
    "tp": "tensor_parallel",
    "kernel_inject": "replace_with_kernel_inject",
    "injection_dict": "injection_policy",
    "tm": "triangular_masking",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "ckpt_config": "checkpoint_config",
    "expert_group": "ep_group",
    "expert_mp_group": "ep_mp_group",
}
# key → what takes its place
WITHOUT_EFFECT = {
    "replace_with_kernel_inject": "the model's own attention is used, such as torch's scaled_dot_product_attention",
    "replace_method": "the layers are found by themselves",
    "return_tuple": "layers return what they return without an engine",
    "triangular_masking": "the model makes its own attention mask",
    "set_empty_params": "a model on the meta device is recognised by itself",
    "enable_cuda_graph": 'transformers records graphs with generate(cache_implementation="static")',
    "use_triton": "the model's own operations are used",
    "triton_autotune": "the model's own operations are used",
    "transposed_mode": "the model's own operations are used",
    "min_out_tokens": "the cache of keys and values grows with the tokens",
    "moe_type": "the model's own layers are used",
}
# key → (values that change nothing, what to do instead)
REFUSED: dict[str, tuple[tuple, str]] = {
    "zero": (
        ({}, None),
        'give initialize {"zero_optimization": {"stage": 3, "offload_param": …}} without an optimizer '
        "(docs/use/inference_engine.md).",
    ),
    "moe": (
        ({}, None, True, False),
        "experts are divided by tensor_parallel. Leave it out.",
    ),
    "ep_size": ((1,), "experts are divided by tensor_parallel. Leave it out."),
    "ep_group": ((None,), "experts are divided by tensor_parallel. Leave it out."),
    "ep_mp_group": ((None,), "experts are divided by tensor_parallel. Leave it out."),
    "moe_experts": (
        ([1],),
        "experts are divided by tensor_parallel. Leave it out.",
    ),
    "training_mp_size": (
        (1,),
        "merge the checkpoint first: megatron-ds convert (docs/scale/checkpoints.md).",
    ),
    "save_mp_checkpoint_path": (
        (None,),
        "files are read by each rank in part, so no divided copy is needed. Leave it out.",
    ),
}
READ = (
    "dtype",
    "tensor_parallel",
    "mp_size",
    "mpu",
    "injection_policy",
    "injection_policy_tuple",
    "checkpoint",
    "base_dir",
    "checkpoint_config",
    "quant",
    "max_out_tokens",
    "keep_module_on_host",
)
KNOWN = (*READ, *WITHOUT_EFFECT, *REFUSED, *SPELLINGS)
NEIGHBOURS = 128


@dataclass(frozen=True)
class StoredFormat:
    """How int8 weights are stored: codes of `bits`, and a scale for each of `groups` parts of a matrix.

    groups: None: a scale for every NEIGHBOURS numbers
    """

    bits: int = 8
    groups: int | None = None


@dataclass(frozen=True)
class InferenceSettings:
    """What `init_inference` was given, in the types that the package uses.

    tp_size     None: 1, or the size of the groups of `mpu`
    group       torch's process group of the ranks that share the model, None: made
    policy      layer class → names of the linear layers whose results are summed over ranks
    checkpoint  a file, a folder, or the keys of DeepSpeed's file; None: the model has its weights
    unused      the keys that were given and have no effect
    """

    dtype: torch.dtype = torch.float16
    tp_size: int | None = None
    mpu: Any = None
    group: Any = None
    policy: Mapping[Any, tuple[str, ...]] | None = None
    checkpoint: Any = None
    base_dir: str = ""
    stored: StoredFormat = StoredFormat()
    max_out_tokens: int = 1024
    on_host: bool = False
    unused: tuple[str, ...] = ()


def read_inference_settings(
    config: Mapping[str, Any], options: Mapping[str, Any]
) -> InferenceSettings:
    """Return the settings of a config and of keyword arguments. Raises one ConfigError with all problems."""
    problems: list[str] = []
    given: dict[str, Any] = {}
    for key, value in [*config.items(), *options.items()]:
        name = SPELLINGS.get(key, key)
        if name in given and given[name] != value:
            problems.append(
                f'init_inference: "{name}" is {given[name]!r} and {value!r}. Give it once.'
            )
        given[name] = value
    problems += _misplaced(given)
    values: dict[str, Any] = {}
    for key, reader in READERS.items():
        if key in given:
            reader(given[key], values, problems)
    reject(problems)
    unused = tuple(key for key in WITHOUT_EFFECT if given.get(key))
    return InferenceSettings(**values, unused=unused)


def _misplaced(given: Mapping[str, Any]) -> list[str]:
    """Return the problems of keys that are not known or cannot be followed."""
    problems = [
        f'init_inference: unknown key "{key}"{did_you_mean(key, list(KNOWN))} Leave it out.'
        for key in given
        if key not in KNOWN
    ]
    for key, (harmless, advice) in REFUSED.items():
        if (
            key in given
            and given[key] not in harmless
            and not _is_one_expert(given[key])
        ):
            problems.append(
                f'init_inference: "{key}": {given[key]!r} is not available: {advice}'
            )
    return problems


def _is_one_expert(value: Any) -> bool:
    """Return whether a block of keys divides nothing: `moe` with one rank, or `zero` at stage 0."""
    if not isinstance(value, Mapping) or not value.keys() & {"ep_size", "stage"}:
        return False
    return value.get("ep_size", 1) == 1 and value.get("stage", 0) == 0


# ------------------------------------------------------------------ readers: (value, values, problems)
def _read_dtype(value: Any, values: dict, problems: list[str]) -> None:
    for names, dtype in DTYPES.items():
        if value == dtype or str(value) in names.split():
            values["dtype"] = dtype
            return
    problems.append(
        f'init_inference: "dtype" is {value!r}: it is torch.half, torch.bfloat16, torch.float32 or '
        "torch.int8, which stores the weights in 8 bits."
    )


def _read_tensor_parallel(value: Any, values: dict, problems: list[str]) -> None:
    if not isinstance(value, Mapping):
        problems.append(
            f'init_inference: "tensor_parallel" is {value!r}: write {{"tp_size": 2}}.'
        )
        return
    known = ("enabled", "tp_size", "tp_grain_size", "mpu", "tp_group")
    for key in value.keys() - set(known):
        problems.append(
            f'init_inference: unknown key "tensor_parallel.{key}"{did_you_mean(key, list(known))} Leave it out.'
        )
    if not value.get("enabled", True):
        return
    if "tp_size" in value:
        _read_size(value["tp_size"], values, problems)
    values["group"] = value.get("tp_group")
    values["mpu"] = value.get("mpu")


def _read_size(value: Any, values: dict, problems: list[str]) -> None:
    if type(value) is not int or value < 1:
        problems.append(
            f'init_inference: "tensor_parallel.tp_size" is {value!r}: it is the number of ranks that share '
            "the model, 1 or more."
        )
    elif values.get("tp_size", value) != value:
        problems.append(
            f'init_inference: "mp_size" is {value} and "tensor_parallel.tp_size" {values["tp_size"]}. Give '
            "tp_size alone."
        )
    else:
        values["tp_size"] = value


def _read_policy(value: Any, values: dict, problems: list[str]) -> None:
    if value is None:
        return
    policy = {}
    for layer, names in value.items() if isinstance(value, Mapping) else [(None, ())]:
        names = (names,) if isinstance(names, str) else names
        is_written = isinstance(names, tuple | list | set) and names
        if not isinstance(layer, type) or not is_written or not _are_texts(names):
            problems.append(
                f'init_inference: "injection_policy" is {value!r}: write {{LayerClass: ("attention.output", '
                '"mlp.output")}}, with the names of the linear layers whose results are summed over ranks.'
            )
            return
        policy[layer] = tuple(names)
    values["policy"] = policy


def _are_texts(names: Any) -> bool:
    return all(isinstance(name, str) for name in names)


def _read_policy_tuple(value: Any, values: dict, problems: list[str]) -> None:
    if value is not None:
        problems.append(
            'init_inference: "injection_policy_tuple" is not available: give injection_policy={LayerClass: '
            "names}."
        )


def _read_quant(value: Any, values: dict, problems: list[str]) -> None:
    if not isinstance(value, Mapping):
        problems.append(
            f'init_inference: "quant" is {value!r}: write {{"weight": {{"num_bits": 8, "q_groups": 64}}}}.'
        )
        return
    # Only weights can be stored as integers, so other requests are refused first.
    weight = value.get("weight") or {}
    activation = value.get("activation") or {}
    if activation and activation.get("enabled", True):
        problems.append(
            'init_inference: "quant.activation" is not available: weights alone are stored in fewer bits. '
            "Leave it out."
        )
    if weight.get("q_type", "symmetric") not in ("symmetric", "sym"):
        problems.append(
            f'init_inference: "quant.weight.q_type" is {weight["q_type"]!r}: only symmetric is available.'
        )
    bits = weight.get("num_bits", 8)
    groups = weight.get("q_groups")
    if bits not in (8, 4):
        problems.append(
            f'init_inference: "quant.weight.num_bits" is {bits!r}: it is 8 or 4.'
        )
    if groups is not None and (type(groups) is not int or groups < 1):
        problems.append(
            f'init_inference: "quant.weight.q_groups" is {groups!r}: it is the number of parts of a matrix '
            "with a scale each, 1 or more."
        )
    if value.get("enabled", True) and weight.get("enabled", True):
        values["stored"] = StoredFormat(bits, groups)


def _read_tokens(value: Any, values: dict, problems: list[str]) -> None:
    if type(value) is not int or value < 1:
        problems.append(
            f'init_inference: "max_out_tokens" is {value!r}: it is the most tokens of a prompt, 1 or more.'
        )
    else:
        values["max_out_tokens"] = value


def _read_places(value: Any, values: dict, problems: list[str]) -> None:
    """Read `checkpoint_config`, the former spelling of three keys."""
    places = value or {}
    if places.get("save_mp_checkpoint_path"):
        problems.append(
            f'init_inference: "checkpoint_config.save_mp_checkpoint_path" is not available: '
            f"{REFUSED['save_mp_checkpoint_path'][1]}"
        )
    if places.get("checkpoint_dir"):
        values["checkpoint"] = places["checkpoint_dir"]
    if places.get("base_dir"):
        values["base_dir"] = places["base_dir"]


def _kept(name: str) -> Callable[[Any, dict, list[str]], None]:
    """Return a reader that stores the value as it is."""

    def read(value: Any, values: dict, problems: list[str]) -> None:
        if value is not None:
            values[name] = value

    return read


READERS: Mapping[str, Callable[[Any, dict, list[str]], None]] = {
    "dtype": _read_dtype,
    "tensor_parallel": _read_tensor_parallel,
    "mp_size": _read_size,
    "mpu": _kept("mpu"),
    "injection_policy": _read_policy,
    "injection_policy_tuple": _read_policy_tuple,
    "checkpoint_config": _read_places,
    "checkpoint": _kept("checkpoint"),
    "base_dir": _kept("base_dir"),
    "quant": _read_quant,
    "max_out_tokens": _read_tokens,
    "keep_module_on_host": _kept("on_host"),
}
