"""What programs for DeepSpeed call beside `initialize`: exports of weights, comm, recomputation, names of
optimizers."""

import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megatron_ds
from megatron_ds.compat.deepspeed import weights_of_zero as zero_to_fp32
from megatron_ds.compat.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from megatron_ds.errors import CheckpointError, ConfigError, NotInitializedError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops.adam import DeepSpeedCPUAdam, FusedAdam
from megatron_ds.zero import ZeroParamStatus
from tests.harness.engine_runs import (
    Odd,
    Stack,
    batches,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    weights,
)
from tests.harness.fake_cuda import FakeGpu, fake_cuda
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

BF16 = {"bf16": {"enabled": True}}


# ---------------------------------------------------------------------------------------------------- exports
def test_a_failed_write_of_the_16_bit_model_is_an_error_on_all_ranks(
    tmp_path, monkeypatch
):
    def save(state, path):
        path.write_bytes(b"half")
        # torch's words for a full disk
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos")

    def main(engine, rank):
        with pytest.raises(
            CheckpointError, match="model.bin could not be written: .* unexpected pos"
        ):
            engine.save_16bit_model(tmp_path, "model.bin")
        return True

    monkeypatch.setattr(torch, "save", save)
    assert on_ranks(2, main, make, config_of(0, 2)) == [True, True]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 3])
def test_the_16_bit_model_is_one_file_for_torch(stage, tmp_path):
    def main(engine, rank):
        train(engine, rank, 1)
        written = (
            engine.save_16bit_model(tmp_path / "all"),
            engine.save_16bit_model(tmp_path, "trained.bin", True),
        )
        return (
            written,
            engine.full_state_dict(),
            engine._zero3_consolidated_16bit_state_dict(),
        )

    (first, state, consolidated), (second, _, other) = on_ranks(
        2, main, make, config_of(stage, 2, **BF16)
    )
    assert first == second == (True, True) and other is None
    found = torch.load(tmp_path / "all" / "pytorch_model.bin", weights_only=True)
    trained = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert (
        found.keys()
        == consolidated.keys()
        == state.keys()
        == make().state_dict().keys()
    )
    assert found.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    for name, value in state.items():
        assert value.dtype == (
            torch.float32 if name == "offset" else torch.bfloat16
        )  # a buffer
        assert torch.equal(found[name], value) and torch.equal(
            consolidated[name], value
        ), name


@pytest.mark.parametrize("tag", [None, "best"])
def test_fp32_weights_are_taken_out_of_a_checkpoint(tag, tmp_path, capsys):
    saved = tmp_path / "saved"

    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(saved, tag)
        return engine.full_state_dict(torch.float32)

    state = on_ranks(2, main, make, config_of(3, 2, **BF16))[0]
    buffers = dict(make().named_buffers())
    expected = {name: value for name, value in state.items() if name not in buffers}
    assert all(value.dtype == torch.float32 for value in expected.values())

    def check(found):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    check(get_fp32_state_dict_from_zero_checkpoint(saved))
    check(get_fp32_state_dict_from_zero_checkpoint(saved, tag, lazy_mode=True))
    loaded = load_state_dict_from_zero_checkpoint(make(seed=9), saved)
    assert all(
        torch.equal(loaded.state_dict()[name], value)
        for name, value in expected.items()
    )
    for arguments, read in (
        (["pytorch_model.bin"], lambda at: torch.load(at, weights_only=True)),
        (
            ["folder"],
            lambda at: torch.load(at / "pytorch_model.bin", weights_only=True),
        ),
        (
            ["safe", "--safe_serialization"],
            lambda at: load_file(at / "model.safetensors"),
        ),
        (["parts", "--max_shard_size", "3KB", "--debug"], read_parts),
    ):
        assert (
            zero_to_fp32.main(
                zero_to_fp32.parse_arguments(
                    [str(saved), str(tmp_path / arguments[0]), *arguments[1:]]
                )
            )
            == 0
        )
        check(read(tmp_path / arguments[0]))
        assert f"wrote {len(state)} fp32 tensors" in capsys.readouterr().out


def read_parts(folder):
    import json

    index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    files = {
        name: torch.load(folder / name, weights_only=True)
        for name in set(index["weight_map"].values())
    }
    assert len(files) > 2
    return {name: files[file][name] for name, file in index["weight_map"].items()}


class Tied(Stack):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


def test_fp32_weights_have_all_names_of_tied_parameters(tmp_path):
    def main(engine, rank):
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path / "saved")

    on_ranks(2, main, lambda: make(Tied), config_of(1, 2))
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    model = make(Tied, seed=9)
    model.load_state_dict(state, strict=True)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, state["head.weight"])
    for safe in (False, True):
        names = convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "saved", tmp_path / f"{safe}", safe_serialization=safe
        )
        file = (
            tmp_path
            / f"{safe}"
            / ("model.safetensors" if safe else "pytorch_model.bin")
        )
        read = load_file(file) if safe else torch.load(file, weights_only=True)
        assert set(names) == read.keys() == state.keys() == model.state_dict().keys()
        assert all(torch.equal(read[name], value) for name, value in state.items())


def test_what_zero_to_fp32_cannot_do_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for wrong, match in (
        (dict(tag="../x"), "not the name of a folder"),
        (dict(max_shard_size="5 apples"), "Write 5GB"),
        (dict(exclude_frozen_parameters=True), "save_16bit_model"),
        ({}, "no checkpoint in"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=match):
            if "max_shard_size" in wrong:
                megatron_ds.utils.zero_to_fp32.bytes_of(wrong["max_shard_size"])
            convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / "empty", tmp_path / "out", **wrong
            )


def test_tied_names_are_filled_when_a_module_is_loaded(tmp_path):
    def build(seed=1):
        module = make(Stack, seed)
        module.head.weight = nn.Parameter(module.head.weight[:, :14].clone())
        module.embed.weight = module.head.weight
        return module

    def main(engine, rank):
        engine.save_checkpoint(tmp_path)
        return engine.full_state_dict()

    state = on_ranks(2, main, build, config_of(2, 2))[0]
    loaded = load_state_dict_from_zero_checkpoint(build(2), tmp_path)
    assert "head.weight" in state and loaded.embed.weight is loaded.head.weight
    assert all(
        torch.equal(loaded.state_dict()[name], value) for name, value in state.items()
    )


# ----------------------------------------------------------------------------------------- optimizers by name
@pytest.mark.parametrize(
    "kind, options, plain",
    [
        (FusedAdam, {}, torch.optim.AdamW),
        (DeepSpeedCPUAdam, {}, torch.optim.AdamW),
        (FusedAdam, {"adam_w_mode": False}, torch.optim.Adam),
        (DeepSpeedCPUAdam, {"adamw_mode": False}, torch.optim.Adam),
    ],
)
def test_deepspeeds_adams_are_torchs(kind, options, plain):
    found = []
    for make_one in (
        lambda ps: kind(ps, lr=0.1, weight_decay=0.3, **options),
        lambda ps: plain(ps, 0.1, weight_decay=0.3),
    ):
        p = nn.Parameter(torch.linspace(-2, 2, 9))
        optimizer = make_one([p])
        for _ in range(3):
            p.grad = p.detach().cos()
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_runs_fused_adam_as_torchs_adamw(stage):
    def of(kind):
        config = config_of(stage, 2)
        del config["optimizer"]

        def run(engine, rank):
            train(engine, rank, 2)
            return engine.full_state_dict()

        return on_ranks(
            2,
            run,
            lambda: make(Odd),
            config,
            optimizer=lambda ps: kind(
                ps, lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.2
            ),
        )[0]

    ours, plain = of(FusedAdam), of(torch.optim.AdamW)
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("stage, decoupled", [(1, True), (3, False)])
def test_fused_adam_without_bias_correction_is_that_of_the_json(stage, decoupled):
    numbers = dict(
        lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.2, bias_correction=False
    )

    def of(**choice):
        config = config_of(stage, 2)
        config["optimizer"] = {
            "type": "Adam",
            "params": {**numbers, "adam_w_mode": decoupled, **choice},
        }
        by_class = {
            "optimizer": lambda ps: DeepSpeedCPUAdam(
                ps, **numbers, adamw_mode=decoupled
            )
        }
        config = (
            config
            if choice
            else {key: value for key, value in config.items() if key != "optimizer"}
        )

        def run(engine, rank):
            train(engine, rank, 2)
            return engine.full_state_dict()

        return on_ranks(
            2, run, lambda: make(Odd), config, **({} if choice else by_class)
        )[0]

    ours = of()
    json = of(bias_correction=False)
    corrected = of(bias_correction=True)
    for name, value in json.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)
    assert (
        max(
            float((ours[name] - value).abs().max()) for name, value in corrected.items()
        )
        > 1e-3
    )


def test_adams_that_are_not_computed_are_refused():
    for kind, options in (
        (FusedAdam, {"bias_correction": False, "amsgrad": True}),
        (DeepSpeedCPUAdam, {"fp32_optimizer_states": False}),
    ):
        with pytest.raises(ConfigError, match="is not supported"):
            kind([nn.Parameter(torch.ones(1))], **options)


# -------------------------------------------------------------------------------- recomputation, comm, device
def test_recomputation_has_the_same_gradients_and_masks():
    layer, x = make(Stack).blocks[0], torch.randn(4, 14, requires_grad=True)
    block = lambda y: nn.functional.dropout(layer(y), 0.5)
    grads = []
    for run in (block, lambda y: megatron_ds.checkpointing.checkpoint(block, y)):
        torch.manual_seed(1)
        grads.append(
            torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()])
        )
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    # A retained graph recomputes in each backward.
    loss = megatron_ds.checkpointing.checkpoint(layer, x).square().sum()
    first, second = (
        torch.autograd.grad(loss, x, retain_graph=retain)[0] for retain in (True, False)
    )
    assert torch.equal(first, second)
    megatron_ds.checkpointing.configure(
        None,
        deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": False}},
    )
    assert megatron_ds.checkpointing.is_configured()
    with pytest.raises(ConfigError, match="partition_activations is not supported"):
        megatron_ds.checkpointing.configure(None, partition_activations=True)


def test_keys_of_recomputation_are_read_from_a_file_too(tmp_path):
    path = tmp_path / "ds.json"
    configure = megatron_ds.checkpointing.configure
    path.write_text('{"activation_checkpointing": {"partition_activations": true}}')
    for given in (path, str(path)):
        with pytest.raises(ConfigError, match="partition_activations is not supported"):
            configure(None, deepspeed_config=given)
    path.write_text('{"activation_checkpointing": {"cpu_checkpointing": true}}')
    configure(None, str(path))
    assert megatron_ds.checkpointing._state["in_cpu"]
    configure(None)
    assert not megatron_ds.checkpointing._state["in_cpu"]
    with pytest.raises(ConfigError, match="deepspeed_config is list: give the JSON"):
        configure(None, deepspeed_config=[])


def test_inputs_of_recomputation_wait_in_host_memory():
    layer = make(Stack).blocks[0]
    with fake_cuda(), FakeGpu() as gpu:
        layer = layer.to("cuda")
        found = []
        most = []
        for away in (False, True):
            megatron_ds.checkpointing.configure(
                None,
                deepspeed_config={
                    "activation_checkpointing": {"cpu_checkpointing": away}
                },
            )
            x = torch.ones(4, 14, device="cuda", requires_grad=True)
            y = megatron_ds.checkpointing.checkpoint(
                layer, megatron_ds.checkpointing.checkpoint(layer, x)
            )
            most.append(megatron_ds.checkpointing._waiting.nbytes)
            gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            found.append([gradient.cpu() for gradient in gradients])
    megatron_ds.checkpointing.configure(None)
    assert most == [0, 2 * 4 * 14 * 4] and not gpu.order.problems
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("has_group", [False, True])
def test_a_program_of_one_process_needs_no_process_group_and_may_have_one(
    monkeypatch, has_group
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    comm = megatron_ds.comm
    for wrong, match in (
        (dict(dist_backend="mpi"), "'mpi' is not supported"),
        (dict(init_method="tcp://x:1"), "without rank and world_size"),
        (dict(init_method="mpi://x"), "the methods are"),
        (dict(dist_init_required=False), "no process group yet"),
    ):
        with pytest.raises(ConfigError, match=match):
            megatron_ds.init_distributed(**wrong)
    if has_group:
        megatron_ds.init_distributed()
    assert torch.distributed.is_initialized() == has_group
    assert (
        "MASTER_PORT" not in os.environ
    )  # the port that Slurm's or Open MPI's job number gives is kept
    x, gathered = torch.arange(3.0), [torch.zeros(3)]
    comm.all_reduce(x)
    comm.broadcast(x, 0, async_op=True).wait()
    comm.all_gather(gathered, x)
    comm.barrier()
    assert torch.equal(x, torch.arange(3.0)) and torch.equal(gathered[0], x)
    assert (
        comm.get_rank(),
        comm.get_world_size(),
        comm.get_local_rank(),
        comm.is_initialized(),
    ) == (0, 1, 0, has_group)
    assert comm.ReduceOp.SUM is torch.distributed.ReduceOp.SUM
    if has_group:
        return
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(NotInitializedError, match="no process group yet"):
        comm.get_rank()


def test_names_of_deepspeed_are_found_where_its_programs_look(monkeypatch, caplog):
    from megatron_ds.compat.deepspeed.accelerator import get_accelerator
    from megatron_ds.compat.deepspeed.moe_layer import MoE
    from megatron_ds.compat.deepspeed.utils import RepeatingLoader, log_dist, logger

    monkeypatch.delitem(
        sys.modules, "deepspeed", raising=False
    )  # transformers may import it
    assert MoE is megatron_ds.moe.MoE is megatron_ds.moe.layer.MoE
    assert get_accelerator().device_name(0) in ("cpu", "cuda:0")
    assert next(RepeatingLoader([5])) == 5 and logger.name == "megatron_ds"
    log_dist("found", ranks=[0])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    caplog.clear()
    with caplog.at_level("INFO"):
        log_dist("before the ranks are joined", ranks=[1])
        log_dist("of another rank", ranks=[0])
    assert caplog.messages == ["[Rank 1] before the ranks are joined"]
    assert callable(megatron_ds.zero.Init) and callable(
        megatron_ds.zero.GatheredParameters
    )
    with pytest.raises(AttributeError, match="no attribute 'Tiled'"):
        megatron_ds.zero.Tiled  # noqa: B018
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_an_engine_are_gathered_under_deepspeeds_name(stage):
    def main(engine, rank):
        weight = engine.module.blocks[0].up.weight
        before = engine.full_state_dict()
        with megatron_ds.zero.GatheredParameters(weight):
            seen = weight.detach().clone()
        with (
            megatron_ds.zero.GatheredParameters([weight], modifier_rank=1),
            torch.no_grad(),
        ):
            weight.add_(rank)
        return before, seen, engine.full_state_dict()

    [(before, seen, after), (_, other, _)] = on_ranks(
        2, main, make, config_of(stage, 2)
    )
    name = "blocks.0.up.weight"
    assert (
        torch.equal(seen, before[name])
        and torch.equal(other, seen)
        and torch.equal(after[name], seen + 1)
    )


def state_of(module, is_sharded=True) -> dict:
    """The weights, gathered as programs written for DeepSpeed do it: where a parameter has `ds_id`."""
    found = {}
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id"):
            is_away = p.ds_status == ZeroParamStatus.NOT_AVAILABLE
            assert is_away == is_sharded
            assert p.ds_numel == p.ds_shape.numel() > 0
            with megatron_ds.zero.GatheredParameters([p]):
                assert p.ds_status == ZeroParamStatus.AVAILABLE
                found[name] = p.detach().clone()
        else:
            found[name] = p.detach().clone()
    return found


@pytest.mark.parametrize("stage, ranks", [(1, 2), (3, 1), (3, 2)])
def test_programs_find_out_by_ds_id_which_parameters_they_must_gather(stage, ranks):
    def main(engine, rank):
        train(engine, rank, 1)
        parameters = list(engine.module.parameters())
        with_id = [hasattr(p, "ds_id") for p in parameters]
        of_shards = [p.ds_tensor.numel() for p in parameters if hasattr(p, "ds_id")]
        found = state_of(engine.module, is_sharded=ranks > 1)
        return found, engine.full_state_dict(), with_id, sum(of_shards)

    results = on_ranks(ranks, main, make, config_of(stage, ranks))
    expected = results[0][1]
    for found, _, with_id, _ in results:
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        assert set(with_id) == {stage == 3}
    if stage == 3:
        numel = sum(p.numel() for p in make().parameters())
        assert sum(of_shard for *_, of_shard in results) == numel


@pytest.mark.parametrize("ranks", [1, 2])
def test_trl_removes_the_hooks_of_stage_3_to_generate_and_adds_them_again(ranks):
    """`remove_hooks` and `add_hooks` of TRL; the forward between them is that of the whole module."""
    utils = pytest.importorskip("trl.models.utils")

    def main(engine, rank):
        train(engine, rank, 1)
        tokens = torch.arange(10).view(2, 5)
        with megatron_ds.zero.GatheredParameters(engine.parameters()):
            utils.remove_hooks(engine)
            with torch.no_grad():
                seen = engine.module(tokens)
            utils.add_hooks(engine)
        plain = make()
        whole = weights(engine)
        plain.load_state_dict(whole, strict=False)
        return torch.equal(seen, plain(tokens)), train(engine, rank, 1, first=1)

    results = on_ranks(ranks, main, make, config_of(3, ranks))
    plainly = on_ranks(ranks, lambda *of: train(*of, 2)[1:], make, config_of(3, ranks))
    assert results == [(True, norms) for norms in plainly]


def test_parameters_of_zero_init_have_deepspeeds_attributes():
    modules, expected = [nn.Linear(3, 5) for _ in range(2)], nn.Linear(3, 5)
    expected.load_state_dict(modules[0].state_dict())

    def main(rank, world):
        megatron_ds.zero.Init(
            module=modules[rank], mpu=Mesh(Grid(dp=2), rank, world.connect)
        )
        return state_of(modules[rank])

    for found in run_ranks(2, main):
        assert all(
            torch.equal(found[name], p) for name, p in expected.named_parameters()
        )
    assert not hasattr(expected.weight, "ds_id")


@pytest.mark.parametrize("save_dir", ["", None])
def test_a_checkpoint_without_a_folder_is_refused(save_dir):
    def main(engine, rank):
        with pytest.raises(ValueError, match="needs a folder"):
            engine.save_checkpoint(save_dir)

    on_ranks(1, main, Stack, config_of(0, 1))


def test_the_loss_that_backward_returns_keeps_its_number_format():
    def main(engine, rank):
        loss = loss_of(engine, batches(1, 2, 1, 0)[0][0]).bfloat16()
        returned = engine.backward(loss)
        assert returned.dtype == torch.bfloat16 and torch.equal(returned, loss / 2)

    on_ranks(1, main, Stack, config_of(0, 1, accumulation=2))


def test_the_monitor_takes_the_config_of_a_deepspeed_config(tmp_path):
    config = config_of(
        0,
        1,
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    )
    monitor = megatron_ds.monitor.MonitorMaster(
        megatron_ds.DeepSpeedConfig(config).monitor_config
    )
    monitor.write_events([("loss", 0.5, 3)])
    [file] = (tmp_path / "run").glob("*.csv")
    assert "3,0.5" in file.read_text().replace(" ", "")


def test_numbers_of_the_version_are_attributes():
    names = ("__version_major__", "__version_minor__", "__version_patch__")
    numbers = [str(getattr(megatron_ds, name)) for name in names]
    assert ".".join(numbers) == megatron_ds.__version__
    assert megatron_ds.__git_hash__ and megatron_ds.__git_branch__
