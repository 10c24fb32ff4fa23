"""How many samples a run wants of each split, and the loaders that deal them out."""

from ..config import RunConfig
from ..data.datasets import Datasets
from ..data.fim import FIMDataset, make_fim
from ..data.loader import Loader
from ..models import MODELS
from ..mpu.mesh import Mesh
from ..ramps import make_batch_size, planned_steps
from .shared_reader import SharedReader
from .trainer import Loaders


def wanted_samples(config: RunConfig) -> tuple[int, int, int]:
    """(train, validation, test) samples the whole run draws, as Megatron counts them.

    Validation: one evaluation every `eval_interval` steps and one at the end, `eval_iters` global batches each.
    """
    train, size = config.train, config.train.global_batch_size
    steps = planned_steps(train, make_batch_size(config))
    samples = train.train_samples or steps * size
    evaluations = steps // train.eval_interval + 1 if train.eval_interval else 1
    one = (train.eval_iters or 0) * size
    return samples, evaluations * one, one


def rearranged(config: RunConfig, datasets: Datasets, tokenizer) -> Datasets:
    """The datasets with their samples changed as --fim-data and its like ask for."""
    if not config.data.fim_data:
        return datasets
    fim = make_fim(config.data, tokenizer)
    return Datasets(*(None if dataset is None else FIMDataset(dataset, fim, config.train.seed + 1000 * part)
                      for part, dataset in enumerate(datasets)))


def build_loaders(config: RunConfig, datasets, tokenizer, mesh: Mesh) -> Loaders:
    """Loaders over the (train, validation, test) datasets; None where a split has no samples."""
    data = config.data
    collate = MODELS[config.model.model].data.collator(config, tokenizer)
    tp = mesh.group("tp")
    shared = data.data_readers == "first" and tp.size > 1

    def loader(dataset):
        if dataset is None:
            return None
        own = Loader(dataset, collate, micro_batch_size=config.train.micro_batch_size, dataloader_type=data.dataloader_type,
                     num_workers=data.num_workers, pin=mesh.device.type == "cuda")
        return SharedReader(own, tp, mesh.device) if shared else own

    return Loaders(*map(loader, datasets))
