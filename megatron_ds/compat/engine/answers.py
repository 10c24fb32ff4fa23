"""`EngineAnswers`: the questions that programs and libraries put to DeepSpeed's engine besides those of
`EngineStatus`: what the JSON asks for, ranks, and calls that need nothing here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...zero.optimizer import StepResult
from ..deepspeed.external_groups import DataParallelWorld

RECOVERY = '''"""Take the fp32 weights out of checkpoints: python zero_to_fp32.py . pytorch_model.bin"""

from megatron_ds.compat.deepspeed.weights_of_zero import run_tool

if __name__ == "__main__":
    raise SystemExit(run_tool())
'''


class EngineAnswers(nn.Module):
    """Methods of DeepSpeed's engine. Attributes: see `EngineStatus`."""

    config: Mapping[str, Any]
    module: nn.Module
    world: DataParallelWorld
    _last: StepResult | None

    def optimizer_name(self) -> str | None:
        """Return the type of the JSON's optimizer, in lower case; None without one."""
        kind = self.config.get("optimizer", {}).get("type")
        return None if kind is None else kind.lower()

    def optimizer_params(self) -> Mapping[str, Any]:
        """Return the parameters of the JSON's optimizer."""
        return self.config.get("optimizer", {}).get("params", {})

    def scheduler_name(self) -> str | None:
        """Return the type of the JSON's scheduler; None without one."""
        return self.config.get("scheduler", {}).get("type")

    def scheduler_params(self) -> Mapping[str, Any]:
        """Return the parameters of the JSON's scheduler."""
        return self.config.get("scheduler", {}).get("params", {})

    def _copy_recovery_script(self, save_path: str | os.PathLike) -> None:
        """Write zero_to_fp32.py into a folder of checkpoints: it takes the fp32 weights out of them."""
        Path(save_path, "zero_to_fp32.py").write_text(RECOVERY)

    def log_level(self) -> str | None:
        """Return the JSON's level of the package's lines; None without one."""
        return self.config.get("log_level")

    def dataloader_drop_last(self) -> bool:
        """Return whether loaders leave out a last batch that is not full."""
        return bool(self.config.get("dataloader_drop_last", False))

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether the JSON asks for whole weights in saved models; `save_16bit_model` always gathers them."""
        block = self._zero_block()
        return bool(
            block.get(
                "stage3_gather_16bit_weights_on_model_save",
                block.get("gather_16bit_weights_on_model_save", False),
            )
        )

    def zero_offload_optimizer(self) -> Mapping[str, Any] | None:
        """Return the JSON's block "offload_optimizer"."""
        return self._zero_block().get("offload_optimizer")

    def zero_offload_param(self) -> Mapping[str, Any] | None:
        """Return the JSON's block "offload_param"."""
        return self._zero_block().get("offload_param")

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's state is in host memory."""
        return (self.zero_offload_optimizer() or {}).get("device") == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self._zero_block().get("stage", 0) >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether weights are sharded."""
        return self._zero_block().get("stage", 0) >= 3

    def fp16_auto_cast(self) -> bool:
        """Return whether inputs of the module are cast to fp16."""
        return bool(self.config.get("fp16", {}).get("auto_cast", False))

    def get_data_parallel_rank(self) -> int:
        """Return the position of this rank among the data-parallel ranks."""
        return self.world.data.rank

    def get_model_parallel_rank(self) -> int:
        """Return the position of this rank among those that hold one copy of the model."""
        return self.world.model.rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` changed the weights: it was at a boundary and was not skipped."""
        return (
            self._last is not None and not self.has_gradients and not self._last.skipped
        )

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
    ) -> None:
        """Compile the module's forward with torch.compile. schedule has no effect."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether the module's forward is compiled."""
        return getattr(self.module, "_compiled_call_impl", None) is not None

    def empty_partition_cache(self) -> None:
        """No effect: weights of stage 3 are freed at the end of each step."""

    def _zero_block(self) -> Mapping[str, Any]:
        return self.config.get("zero_optimization", {})
