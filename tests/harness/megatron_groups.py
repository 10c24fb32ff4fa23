"""What the getters of megatron-core answer, of any rank of any grid, in one process.

python -m tests.harness.megatron_groups < JOBS > ANSWERS

JOBS: [{"rank", "ranks", "tp", "cp", "pp", "ep", "etp", "names"}, …]; ANSWERS: [{name: number, or ranks of a group}, …],
of the names that it has. torch's fake backend connects no other process, so that this one is each rank in turn.
"""

import json
import sys
from functools import partial


def answer(job: dict) -> dict:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", rank=job["rank"], world_size=job["ranks"], store=FakeStore()
    )
    parallel_state.initialize_model_parallel(
        job["tp"],
        job["pp"],
        context_parallel_size=job["cp"],
        expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"],
        create_gloo_process_groups=False,
    )
    found = {}
    for name in filter(partial(hasattr, parallel_state), job["names"]):
        value = getattr(parallel_state, name)()
        is_group = isinstance(value, dist.ProcessGroup)
        found[name] = dist.get_process_group_ranks(value) if is_group else value
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    json.dump([answer(job) for job in json.load(sys.stdin)], sys.stdout)
