"""Train and save tiny GPTs with megatron-core on CPUs: the foreign program of the conversion tests.

A server, since importing megatron-core takes seconds: it reads a job as a line of JSON from standard input,
forks its ranks, and answers with a line "done" or "failed". A job:

    ranks, tp, pp, ep layout; the rest of the ranks are data-parallel
    vp                chunks of the model on each pipeline rank
    model             arguments of TransformerConfig and GPTModel
    dtype             of the weights: float32 or bfloat16
    distributed       whether the optimizer is megatron-core's distributed one
    load              folder of a torch_dist checkpoint with optimizer state to start from; or null
    steps             training steps before saving, each on the next of the batches in `batches`
    batches           file of int64 [steps, batch, sequence + 1]; first_batch: where the run begins
    saves             [format, folder, sharding of the optimizer state] …
    after             folder for rank{r}.pt: {"saved" weights, then of one more step "logits" and "loss"
                      before it, "weights" after it}

With pp > 1 and for a BERT there are no batches: gradients are random. A BERT has "logits" and "order" after
its last step, of the first of `batches`.

Nothing heavy is imported at the top, because megatron-core's writer may start this file again.
"""

import faulthandler
import json
import os
import sys
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch
    from megatron.core import dist_checkpointing, parallel_state  # noqa: F401  imported once, before forks
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401
    from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [fork(job, rank) for rank in range(job["ranks"])]
        failed = [os.waitpid(pid, 0)[1] for pid in ranks]
        print("failed" if any(failed) else "done", flush=True)


def fork(job: dict, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    faulthandler.dump_traceback_later(job["timeout"], exit=True)
    try:
        run(job, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(job: dict, rank: int) -> None:
    import torch

    store = torch.distributed.FileStore(job["store"], job["ranks"])
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"])
    with without_gpu():
        train(job, rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def without_gpu():
    """megatron-core as if the CPU were its GPU."""
    import queue

    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if function is torch.Tensor.type and len(args) == 1:
                return str(function(*args)).replace("torch.", "torch.cuda.")
            if function is torch.Tensor.cuda:
                return args[0]
            return function(*args, **kwargs)

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: None
    moe_utils.te_general_gemm = None                    # undefined without TransformerEngine
    random.CudaRNGStatesTracker.fork = lambda self, *_: nullcontext()
    filesystem_async._process_memory = lambda: 0        # it needs psutil
    results = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: results
    with OnCpu():
        yield


def train(job: dict, rank: int) -> None:
    import torch
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        job["tp"], job["pp"], expert_model_parallel_size=job["ep"],
        virtual_pipeline_model_parallel_size=job["vp"] if job["vp"] > 1 else None)
    model, optimizer = make(job)
    is_bert = job["model"].get("bert", False)
    has_batches = job["pp"] == 1 and not is_bert
    batches = torch.load(job["batches"]) if has_batches else [None] * (job["steps"] + 1)
    batches = batches[job.get("first_batch", 0):]
    if job["load"]:
        train_step(job, model, optimizer, batches[0], 0)    # makes state, as torch's Adam needs it
        load(job, model, optimizer)
    for step in range(job["steps"]):
        train_step(job, model, optimizer, batches[step], step)
    for format, folder, sharding in job["saves"]:
        {"torch": save_torch, "torch_dist": save_torch_dist}[format](job, model, optimizer, folder, sharding)
    after = {"saved": weights_of(model)}
    if is_bert and job["pp"] == 1:
        after["logits"], after["order"] = outputs_of_bert(*model, torch.load(job["batches"])[0][:, :-1])
    elif job["pp"] == 1:
        after["logits"], after["loss"] = train_step(job, model, optimizer, batches[job["steps"]], 0)
    after["weights"] = weights_of(model)
    Path(job["after"]).mkdir(parents=True, exist_ok=True)
    torch.save(after, f"{job['after']}/rank{rank}.pt")


def weights_of(chunks) -> dict:
    """Layers are numbered from 0 in each chunk; names of chunks after the first begin with its number."""
    return {f"{number}." * (number > 0) + name: p.detach().clone() for number, chunk in enumerate(chunks)
            for name, p in chunk.module.named_parameters()}


def outputs_of_bert(model, tokens):
    """(logits [b, s, vocabulary], of the order of segments [b, 2]) of sequences without padding."""
    import torch

    with torch.no_grad():
        return model(tokens.contiguous(), torch.ones_like(tokens), torch.zeros_like(tokens))


def names_of(chunks) -> list[str]:
    """Keys of the chunks in checkpoints of Megatron-LM."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def make(job: dict):
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1234)
    dtype = getattr(torch, job["dtype"])
    shape = dict(job["model"])
    is_bert = shape.pop("bert", False)
    if shape.pop("swiglu", False):
        shape |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    of_gpt = ("position_embedding_type", "share_embeddings_and_output_weights", "vocab_size",
              "max_sequence_length", "rotary_base")
    gpt = {name: shape.pop(name) for name in of_gpt if name in shape}
    config = TransformerConfig(
        use_cpu_initialization=True, tensor_model_parallel_size=job["tp"], params_dtype=dtype,
        expert_model_parallel_size=job["ep"],
        virtual_pipeline_model_parallel_size=job["vp"] if job["vp"] > 1 else None,
        bf16=dtype == torch.bfloat16, pipeline_model_parallel_size=job["pp"], pipeline_dtype=dtype,
        hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False, **shape)
    spec = get_gpt_layer_local_spec(shape.get("num_moe_experts"), shape.get("moe_grouped_gemm", False),
                                    shape.get("qk_layernorm", False),
                                    normalization=shape.get("normalization"))
    if isinstance(shape.get("moe_layer_freq"), list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False,
                                          normalization=shape.get("normalization"))
    stages = [dict(ignore_virtual=False, vp_stage=number) for number in range(job["vp"])]
    if is_bert:
        kind, spec, gpt = BertModel, bert_layer_local_spec, {**gpt, "num_tokentypes": 2}
    else:
        kind = GPTModel
    models = [kind(config, transformer_layer_spec=spec, **gpt,
                   pre_process=parallel_state.is_pipeline_first_stage(**stage),
                   post_process=parallel_state.is_pipeline_last_stage(**stage),
                   vp_stage=stage["vp_stage"] if job["vp"] > 1 else None) for stage in stages]
    with torch.no_grad():       # CPU initialization leaves biases zero and norms one
        torch.manual_seed(77)
        for p in (p for model in models for p in model.parameters()):
            if p.dim() == 1 and not getattr(p, "tensor_model_parallel", False):
                p.add_(0.1 * torch.randn_like(p))
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=job["distributed"],
                                        grad_reduce_in_fp32=True, bucket_size=job.get("bucket_size"))
    wrapped = [DistributedDataParallel(config, ddp, model.to(dtype), disable_bucketing=number > 0 or
                                       job.get("bucket_size") is None) for number, model in enumerate(models)]
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=job["lr"], min_lr=job["lr"], weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
        adam_eps=1e-8, clip_grad=1.0, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=job["distributed"]), wrapped)
    for group in optimizer.param_groups:        # Megatron-LM's scheduler does this before each step
        group["weight_decay"] = 0.1 * group["wd_mult"]
    return wrapped, optimizer


def train_step(job: dict, chunks, optimizer, batch, step: int):
    """(logits, loss) of the batch before the step."""
    import torch
    from megatron.core import parallel_state

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if batch is None:
        torch.manual_seed(5 + step + 100 * parallel_state.get_pipeline_model_parallel_rank())
        for name, p in (pair for chunk in chunks for pair in chunk.module.named_parameters()):
            drawn = 0.1 * torch.randn(p.shape)
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):      # tied: the same
                drawn = 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            p.main_grad.copy_(drawn)
        optimizer.step()
        return None, None
    model, = chunks
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = batch[rank::size]
    tokens, labels = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    with torch.no_grad():
        logits = model(tokens, positions, None)
    loss = model(tokens, positions, None, labels=labels).float().mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    return logits.float(), loss.detach()


def metadata_of(sharding):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    named = {"distrib_optim_sharding_type": sharding} if sharding else {}
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group,
            **named}


def sharded_state(job: dict, chunks, optimizer, sharding, is_loading: bool) -> dict:
    metadata = metadata_of(sharding if job["distributed"] else None) | job.get("metadata", {})
    named = {name: chunk.module.sharded_state_dict(metadata=metadata)
             for name, chunk in zip(names_of(chunks), chunks)}
    # Megatron-LM passes the same sharded tensors of the model to the optimizer.
    weights = named if len(named) > 1 else named["model"]
    return {**named, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading,
                                                               metadata=metadata)}


def arguments(job: dict):
    """The Namespace that Megatron-LM would store."""
    from argparse import Namespace

    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    shape, rank = job["model"], torch.distributed.get_rank()
    heads, position = shape["num_attention_heads"], shape.get("position_embedding_type", "learned_absolute")
    groups = shape.get("num_query_groups")
    return Namespace(
        num_layers=shape["num_layers"], hidden_size=shape["hidden_size"], num_attention_heads=heads,
        ffn_hidden_size=shape["ffn_hidden_size"], group_query_attention=groups is not None,
        num_query_groups=groups or 1, kv_channels=shape["hidden_size"] // heads,
        seq_length=16, max_position_embeddings=shape["max_sequence_length"], position_embedding_type=position,
        rotary_base=shape.get("rotary_base", 10000), rotary_percent=1.0, add_position_embedding=True,
        normalization=shape.get("normalization", "LayerNorm"), norm_epsilon=1e-5,
        swiglu=shape.get("swiglu", False), add_bias_linear=shape.get("add_bias_linear", True),
        add_qkv_bias=False, bias_gelu_fusion=False, qk_layernorm=shape.get("qk_layernorm", False),
        squared_relu=False,
        untie_embeddings_and_output_weights=not shape.get("share_embeddings_and_output_weights", False),
        vocab_size=job.get("true_vocab_size"), padded_vocab_size=shape["vocab_size"],
        make_vocab_size_divisible_by=128, openai_gelu=False, onnx_safe=None,
        num_experts=shape.get("num_moe_experts"), hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=job["tp"], pipeline_model_parallel_size=job["pp"],
        expert_model_parallel_size=job["ep"], world_size=job["ranks"], rank=rank,
        virtual_pipeline_model_parallel_size=job["vp"] if job["vp"] > 1 else None,
        data_parallel_size=job["ranks"] // job["tp"] // job["pp"], optimizer="adam", lr=job["lr"],
        weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
        bf16=job["dtype"] == "bfloat16", fp16=False,
        use_distributed_optimizer=job["distributed"], ckpt_format="torch_dist", consumed_train_samples=8,
        consumed_valid_samples=0, iteration=job["steps"], model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto, transformer_impl="local", tokenizer_type="NullTokenizer",
        bert_binary_head=True, overlap_grad_reduce=job.get("bucket_size") is not None,
        ddp_bucket_size=job.get("bucket_size"), moe_router_topk=shape.get("moe_router_topk", 2),
        moe_layer_freq=shape.get("moe_layer_freq", 1), moe_ffn_hidden_size=shape.get("moe_ffn_hidden_size"),
        moe_router_load_balancing_type=shape.get("moe_router_load_balancing_type", "none"))


def common(job: dict) -> dict:
    return {"args": arguments(job), "checkpoint_version": 3.0, "iteration": job["steps"],
            "num_floating_point_operations_so_far": 0,
            "opt_param_scheduler": {"max_lr": job["lr"], "num_steps": 8, "start_wd": 0.1, "end_wd": 0.1}}


def save_torch_dist(job: dict, model, optimizer, folder, sharding) -> None:
    import torch
    from megatron.core import dist_checkpointing

    step = Path(folder) / f"iter_{job['steps']:07d}"
    step.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content = {name: value for name, value in metadata_of(sharding).items() if name != "dp_cp_group"}
    state = common(job) | sharded_state(job, model, optimizer, sharding, is_loading=False)
    dist_checkpointing.save(state, str(step), content_metadata=content)
    torch.distributed.barrier()
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(job["steps"]))


def save_torch(job: dict, model, optimizer, folder, _) -> None:
    import torch
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if job["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if job["ep"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    place = Path(folder) / f"iter_{job['steps']:07d}" / name
    place.mkdir(parents=True, exist_ok=True)
    first = parallel_state.get_expert_data_parallel_rank() == 0
    weights = {name: chunk.module.state_dict_for_save_checkpoint()
               for name, chunk in zip(names_of(model), model)}
    state = common(job) | weights | {"optimizer": optimizer.state_dict(),
                                     "rng_state": [{"torch_rng_state": torch.get_rng_state()}]}
    if job["distributed"]:
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if first:
        torch.save(state, place / "model_optim_rng.pt")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(job["steps"]))


def load(job: dict, model, optimizer) -> None:
    from megatron.core import dist_checkpointing

    folder, sharding = job["load"]
    step = (Path(folder) / "latest_checkpointed_iteration.txt").read_text()
    path = str(Path(folder) / f"iter_{int(step):07d}")
    state = sharded_state(job, model, optimizer, sharding, is_loading=True)
    accept_states_without_step()
    found = dist_checkpointing.load(state, path)
    for name, chunk in zip(names_of(model), model):
        chunk.module.load_state_dict(found[name])
    optimizer.load_state_dict(found["optimizer"])
    for one in optimizer.chained_optimizers:        # all parameters share one tensor, which each step of
        for state in one.optimizer.state.values():  # torch's Adam would count up once for each of them
            state["step"] = state["step"].clone()


def accept_states_without_step() -> None:
    """megatron-core's loader of fully_reshardable expects the Adam of TransformerEngine, whose state of a
    parameter has no step. torch's Adam has one, which load_state_dict has set already."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, param, tensors):
        current = self._get_main_param_and_optimizer_states(param)
        original(self, param, {**({"step": current["step"].clone()} if "step" in current else {}), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


if __name__ == "__main__":
    main()
