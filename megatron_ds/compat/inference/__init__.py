"""Inference with DeepSpeed's arguments (docs/use/inference_engine.md):

    engine = megatron_ds.init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.bfloat16)

inference/settings.py   the keys of the config
stored_weights.py       weights in 8 or 4 bits
whole_checkpoint.py     weights from files
inference/engine.py     the engine
../division/            the division of a model over ranks
"""

from .engine import InferenceEngine, init_inference

__all__ = ["InferenceEngine", "init_inference"]
