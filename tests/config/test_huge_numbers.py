"""A huge number in a flag or file name is accepted or refused before anything of that length is allocated."""

import pytest

from megatron_ds.compat.conversion.deepspeed.folder import files_of
from megatron_ds.config.messages import divisors, either
from megatron_ds.config.parse import parse
from megatron_ds.config.run import all_options
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.training.pretrain import KNOWN_NAMES, RULES
from tests.harness.limits import bounded

pytestmark = pytest.mark.plan

FLAGS = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--micro-batch-size": "2",
    "--train-iters": "4",
    "--lr": "1e-3",
    "--vocab-size": "64",
}
WHOLE = sorted(option.flag for option in all_options().values() if option.kind is int)


@pytest.mark.parametrize("number", [10**9, 10**18])
@pytest.mark.parametrize("more", [{}, {"--num-experts": "4"}], ids=["dense", "experts"])
def test_every_option_with_a_huge_number_is_accepted_or_refused_at_once(number, more):
    refused = 0
    for flag in WHOLE:
        words = [
            word
            for pair in ({**FLAGS, **more} | {flag: str(number)}).items()
            for word in pair
        ]
        with bounded(seconds=10):
            try:
                parse([*words, "--mock-data"], known=KNOWN_NAMES, rules=RULES)
            except ConfigError as error:
                assert str(error) and len(str(error)) < 9000, flag
                refused += 1
    assert refused > 20


@pytest.mark.parametrize("flag", ["--num-layers", "--seed"])
def test_a_number_of_thousands_of_digits_is_out_of_range(flag):
    words = [word for pair in (FLAGS | {flag: "9" * 5000}).items() for word in pair]
    with pytest.raises(
        ConfigError, match="999… is out of range; it must be at most"
    ) as error:
        parse([*words, "--mock-data"])
    assert len(str(error.value)) < 1000


def test_divisors_are_all_divisors_and_those_of_a_huge_number_are_quick():
    for number in (0, 1, 2, 12, 97, 360, 5040, 99991, 10**6):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    with bounded(seconds=10):
        assert divisors(10**18)[:4] == [1, 2, 4, 5] and divisors(10**18)[-1] == 10**18
        assert divisors(999999000001 * 999999000001)[0] == 1
        assert either(range(1, 10**18)) == f"1 to {10**18 - 1}"
        assert either(range(2, 10**18, 2)).endswith(f", … or {10**18 - 2}")


@pytest.mark.parametrize(
    "name, says",
    [
        (
            "expp_rank_999999999_mp_rank_00_optim_states.pt",
            "999999999 expp_rank files are missing, first that of "
            "expert-parallel rank 0",
        ),
        (
            "zero_pp_rank_999999999_mp_rank_00_model_states.pt",
            "model_states files are missing",
        ),
        ("layer_999999999-model_999999999-model_states.pt", "layer files are missing"),
        (
            "zero_pp_rank_999999999_mp_rank_999999999_optim_states.pt",
            "optim_states files are missing",
        ),
    ],
)
def test_a_number_in_a_file_name_is_not_allocated(name, says, tmp_path):
    for each in ("mp_rank_00_model_states.pt", name):
        (tmp_path / each).touch()
    with bounded(seconds=10), pytest.raises(CheckpointError, match=says):
        files_of(tmp_path)
