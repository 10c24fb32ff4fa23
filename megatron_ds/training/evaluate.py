"""Mean loss over held-out samples, forward only. The same samples under every layout."""

import time

from .build import Engine
from .report import share


def evaluate(engine: Engine, loader, *, first_sample: int, iterations: int, global_batch_size: int,
             should_stop=lambda: False) -> tuple[float, float, bool]:
    """(mean loss over `iterations` global batches, seconds, whether a rank wished to stop meanwhile).

    Collective over the world. A wish to stop ends the evaluation after the current batch; its mean is then over fewer.
    """
    start, total, done, stop = time.perf_counter(), 0.0, 0, False
    data = engine.mesh.group("dp", "cp")
    train = engine.config.train
    while done < iterations and not stop:
        batch = loader.batch(first_sample + done * global_batch_size, global_batch_size, data.rank, data.size,
                             training=False).to(engine.mesh.device)
        microbatches = batch.split(train.micro_batch_size)
        losses = engine.executor.forward(microbatches)
        report = share(losses, engine.mesh, should_stop(), train.calculate_per_token_loss)
        total, done, stop = total + report.loss, done + 1, report.stop
    return total / max(done, 1), time.perf_counter() - start, stop
