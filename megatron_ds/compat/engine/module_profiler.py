"""`ModuleProfiler`: FLOPs, parameters and times of any module's forward, by DeepSpeed's names.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(inputs)
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()

    flops, macs, params = get_model_profile(model, input_shape=(8, 3, 224, 224))

FLOPs are those of matrix products, convolutions and attention, counted by torch (`FlopCounterMode`) as the operations
run, so no function is patched and what a module calls in C++ is seen too. A multiplication and an addition are two
FLOPs. Causal attention counts whole squares of scores, as in DeepSpeed. Kernels that torch does not know, such as
those of other packages, count nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ...mpu.host_reads import wait_until

PRECISION = 2
UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def _attention_of_cpus(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of an operation that torch's counter leaves out. Arguments are shapes."""
    return sdpa_flop_count(query, key, value)


EXTRA = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_of_cpus}


@dataclass
class ModuleCost:
    """What one module has and has done, its children included.

    calls      of its forward
    seconds    of all calls; on a GPU, of the device
    """

    name: str
    kind: str
    depth: int
    params: int
    flops: int = 0
    calls: int = 0
    seconds: float = 0.0

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations: each is two FLOPs."""
        return self.flops // 2


class ModuleProfiler:
    """Profiles what runs between `start_profile` and `stop_profile`. DeepSpeed's `FlopsProfiler`.

    ds_engine                the engine whose phases the report adds, if any
    recompute_fwd_factor     part of the forward that the backward computes again
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: Any = None,
        recompute_fwd_factor: float = 0.0,
    ):
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._costs: dict[nn.Module, ModuleCost] = {}
        self._counter: FlopCounterMode | None = None
        self._hooks: list = []
        self._open: list[tuple[nn.Module, Any, int]] = []
        self._ended: list[tuple[nn.Module, Any, Any]] = []
        self._ignored: tuple[type, ...] = ()

    # ------------------------------------------------------------------ measuring
    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin to count. ignore_list: classes of modules whose FLOPs are left out, also in the sums."""
        self.reset_profile()
        self._ignored = tuple(ignore_list or ())
        self._counter = FlopCounterMode(display=False, custom_mapping=EXTRA)
        self._counter.__enter__()
        # The first operation that is counted imports much of torch.
        torch.mm(torch.ones(1, 1), torch.ones(1, 1))
        self._watch()

    def time_alone(self, call: Callable[[], Any]) -> None:
        """Measure the times again, without the counting of operations, which slows small ones."""
        for cost in self._costs.values():
            cost.calls = 0
            cost.seconds = 0.0
        self._watch()
        call()
        self.stop_profile()

    def _watch(self) -> None:
        for module in self._costs:
            self._hooks += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting; the numbers stay until `end_profile`."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, begin, end in self._ended:
            self._costs[module].seconds += _seconds_between(begin, end)
        self._ended.clear()
        self._open.clear()

    def reset_profile(self) -> None:
        """Set all numbers to zero."""
        self._costs = {
            module: ModuleCost(
                name,
                type(module).__name__,
                name.count(".") + bool(name),
                _parameters_of(module),
            )
            for name, module in self.model.named_modules()
        }

    def end_profile(self) -> None:
        """Stop, and drop the numbers."""
        self.stop_profile()
        self.started = False
        self._costs = {}

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._open.append((module, _now(self._device), self._flops_now()))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        # A forward that raised has no end: what it opened is dropped with it.
        while self._open:
            entered, begin, before = self._open.pop()
            if entered is module:
                break
        cost = self._costs[module]
        flops = self._flops_now() - before
        if isinstance(module, self._ignored):
            self._open = [(m, b, f + flops) for m, b, f in self._open]
            flops = 0
        cost.flops += flops
        cost.calls += 1
        self._ended.append((module, begin, _now(self._device)))

    def _flops_now(self) -> int:
        return 0 if self._counter is None else self._counter.get_total_flops()

    @property
    def _device(self) -> torch.device:
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    # ------------------------------------------------------------------ numbers
    @property
    def _root(self) -> ModuleCost:
        return self._costs[self.model]

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """FLOPs of the model's forward."""
        return flops_to_string(self._root.flops) if as_string else self._root.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulate operations of the model's forward."""
        return macs_to_string(self._root.macs) if as_string else self._root.macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of the model's forward."""
        seconds = self._root.seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model, also of those that ranks share."""
        return params_to_string(self._root.params) if as_string else self._root.params

    # ------------------------------------------------------------------ text
    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the sums, the costliest modules of each depth and, if `detailed`, the tree of modules.

        module_depth: the depth of the list of the costliest modules, -1 for the innermost; output_file: in place
        of the standard output
        """
        lines = [
            f"FLOPs profile of step {profile_step}",
            *self._head(),
            *self._aggregated(module_depth, top_modules),
            *(self._tree() if detailed else ()),
        ]
        with _stream(output_file) as stream:
            print("\n".join(lines), file=stream)

    def print_model_aggregated_profile(
        self, module_depth: int = -1, top_modules: int = 1
    ) -> None:
        """Print the costliest modules of each depth."""
        print("\n".join(self._aggregated(module_depth, top_modules)))

    def _head(self) -> Iterator[str]:
        root = self._root
        yield f"  {'params of model:':34}{params_to_string(root.params)}"
        yield f"  {'fwd MACs:':34}{macs_to_string(root.macs)}"
        yield f"  {'fwd flops:':34}{flops_to_string(root.flops)}"
        yield f"  {'fwd latency:':34}{duration_to_string(root.seconds)}"
        if root.seconds:
            speed = root.flops / root.seconds
            yield f"  {'fwd FLOPS = fwd flops / latency:':34}{flops_to_string(speed)}"

    def _aggregated(self, module_depth: int, top_modules: int) -> Iterator[str]:
        """By depth, the kinds of modules with most parameters, MACs and time."""
        deepest = max(cost.depth for cost in self._costs.values())
        last = deepest if module_depth < 0 else min(module_depth, deepest)
        for depth in range(last + 1):
            kinds: dict[str, ModuleCost] = {}
            for cost in self._costs.values():
                if cost.depth == depth:
                    _add(kinds.setdefault(cost.kind, _nothing(cost)), cost)
            yield f"  depth {depth}:"
            yield f"    params      {_top(kinds, 'params', params_to_string, top_modules)}"
            yield f"    MACs        {_top(kinds, 'macs', macs_to_string, top_modules)}"
            yield f"    fwd latency {_top(kinds, 'seconds', duration_to_string, top_modules)}"

    def _tree(self) -> Iterator[str]:
        """Yield a line a module: parameters, MACs and time, with their shares of the model's."""
        root = self._root
        for cost in self._costs.values():
            name = cost.name.rpartition(".")[2]
            place = f"({name}): {cost.kind}" if name else cost.kind
            yield (
                f"  {'  ' * cost.depth}{place}  "
                f"{params_to_string(cost.params)} = {_share(cost.params, root.params)} params, "
                f"{macs_to_string(cost.macs)} = {_share(cost.macs, root.macs)} MACs, "
                f"{duration_to_string(cost.seconds)} = {_share(cost.seconds, root.seconds)} latency"
            )


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOPs, MACs, parameters) of a model's forward, as numbers or as text; DeepSpeed's arguments.

    input_shape   of one tensor, of the dtype and device of the parameters; or give args and kwargs
    mode          "forward", or "generate" for `model.generate`
    Raises ValueError without any input. The model is put into evaluation mode, as DeepSpeed does.
    """
    # The input, and what is called with it.
    if input_shape is not None:
        like = next(model.parameters(), torch.ones(()))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ValueError(
            "get_model_profile has nothing to give to the model. Give input_shape, or args or kwargs."
        )
    function: Any = model.generate if mode == "generate" else model
    call = lambda: function(*args, **(kwargs or {}))
    model.eval()
    for _ in range(warm_up):
        call()
    # Operations are counted in one call, and times are measured in another.
    profiler = ModuleProfiler(model)
    profiler.start_profile(ignore_modules)
    call()
    profiler.stop_profile()
    profiler.time_alone(call)
    flops = profiler.get_total_flops(as_string)
    macs = profiler.get_total_macs(as_string)
    params = profiler.get_total_params(as_string)
    if print_profile:
        profiler.print_model_profile(
            warm_up, module_depth, top_modules, detailed, output_file
        )
    profiler.end_profile()
    return flops, macs, params


# ------------------------------------------------------------------ numbers as text
def number_to_string(
    num: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """ "1.5 G". units: one of T, G, M, K, m, u; by default the largest that fits."""
    if units is None:
        fitting = (unit for unit, size in UNITS.items() if num >= size)
        units = next(fitting, "u") if num else ""
    return f"{round(num / UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(
    flops: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """ "1.5 GFLOPS"."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(
    macs: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """ "1.5 GMACs"."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(
    b: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """ "1.5 MB"."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(
    duration: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """ "1.5 ms"."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(
    params_num: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """ "1.5 B": billions of parameters have a B."""
    units = units and units.replace("B", "G")
    text = number_to_string(params_num, units, precision)
    return text.replace("G", "B").strip()


# ------------------------------------------------------------------ parts
def _parameters_of(module: nn.Module) -> int:
    """At ZeRO stage 3 a parameter may be empty; `ds_numel` is its size."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


def _now(device: torch.device) -> Any:
    """Return a moment: of a GPU an event, which is read when the profile ends."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    wait_until(end.query)
    return begin.elapsed_time(end) / 1000


def _nothing(cost: ModuleCost) -> ModuleCost:
    return ModuleCost(cost.name, cost.kind, cost.depth, 0)


def _add(total: ModuleCost, cost: ModuleCost) -> None:
    total.params += cost.params
    total.flops += cost.flops
    total.calls += cost.calls
    total.seconds += cost.seconds


def _top(
    kinds: Mapping[str, ModuleCost], what: str, text: Callable[[Any], str], count: int
) -> str:
    """ "Linear 1.5 M, Embedding 0.3 M": the largest ones."""
    value = lambda cost: getattr(cost, what)
    largest = sorted(kinds.values(), key=value, reverse=True)[:count]
    return ", ".join(f"{cost.kind} {text(value(cost))}" for cost in largest)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


@contextmanager
def _stream(output_file: str | None) -> Iterator[TextIO]:
    opened = open(output_file, "w") if output_file else nullcontext(sys.stdout)
    with opened as stream:
        yield stream
