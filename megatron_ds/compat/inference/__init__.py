"""Inference with DeepSpeed's arguments (docs/use/inference_engine.md):

    engine = megatron_ds.init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.bfloat16)

inference/settings.py   the keys of the config
split_plan.py           which linear layers of a model are divided over the ranks, and how
split_layers.py         the division of a layer
split_proof.py          the comparison of the divided model with the whole one
stored_weights.py       weights in 8 or 4 bits
whole_checkpoint.py     weights from files
inference/engine.py     the engine
"""

from .engine import InferenceEngine, init_inference

__all__ = ["InferenceEngine", "init_inference"]
