"""`check_replicas`: do data-parallel ranks hold the same weights? A fault of the hardware changes them."""

import hashlib

import torch

from ...errors import MegatronDSError
from ...mpu.collectives import all_gather_object
from ...mpu.host_reads import wait_for_work
from ...mpu.managed_parameter import spec_of
from ...mpu.mesh import Mesh
from ...mpu.param_spec import DATA_AXES
from ...training.moments import RunStart, StepEnd
from ...training.observer import LAST, Observer, due
from ...zero.optimizer import ZeroOptimizer


class ReplicaError(MegatronDSError):
    """Weights of data-parallel ranks differ. Raised on all ranks together."""

    on_all_ranks = True


def check_replicas(optimizer: ZeroOptimizer, mesh: Mesh, step: int) -> None:
    """Compare the weights that several data-parallel ranks hold whole. Collective over the world.

    Raises ReplicaError on all ranks, with the first weight that differs. The host waits for the device.
    """
    optimizer.wait_for_weights()
    wait_for_work(mesh.device, mesh.group("world"))
    # Weights that every data-parallel rank holds whole.
    digests: dict[str, str] = {}
    for s in optimizer.sets:
        if s.plan.reduced_over == DATA_AXES and not s.plan.units:
            digests |= {spec_of(p).name: _digest(p) for p in s.parameters}
    place = mesh.coordinate("tp"), mesh.coordinate("pp")
    found = all_gather_object((place, digests), mesh.group("world"))
    # Each rank is compared with the first one of its place in the model.
    first: dict[tuple[int, int], tuple[int, dict[str, str]]] = {}
    for rank, (at, theirs) in enumerate(found):
        original, expected = first.setdefault(at, (rank, theirs))
        name = next((name for name in theirs if theirs[name] != expected[name]), None)
        if name is not None:
            raise ReplicaError(
                f"after iteration {step} the weight {name} of rank {rank} differs "
                f"from that of rank {original}, though both computed the same "
                "update: the memory or the computation of one of them is faulty. "
                "Continue from the last checkpoint without that machine."
            )


def _digest(parameter: torch.Tensor) -> str:
    """Return a hash of the bytes of a weight."""
    flat = parameter.detach().contiguous().view(-1)
    data = flat.view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


class ComparedReplicas(Observer):
    """--check-weight-hash-across-dp-replicas-interval: do data-parallel ranks hold the same weights?"""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Keep what is compared."""
        self._replica = start.replica
        train = start.config.train
        self._interval = train.check_weight_hash_across_dp_replicas_interval

    def step_ended(self, end: StepEnd) -> None:
        """Compare the weights, if it is due. Collective over the world; raises ReplicaError on all ranks."""
        if due(self._interval, end.step):
            check_replicas(self._replica.optimizer, self._replica.mesh, end.step)
