"""Functions of `deepspeed.launcher` that choose hosts, slots and cores."""

import pytest
from megatron_ds.launcher.runner import main, parse_resource_filter
from megatron_ds.utils.numa import parse_range_list

from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

HOSTS = {"a": [0, 1, 2], "b": [0, 1]}


@pytest.mark.parametrize(
    "choice,left",
    [
        ({}, HOSTS),
        ({"include_str": "b"}, {"b": [0, 1]}),
        ({"include_str": "b:1@a:2,2,0"}, {"a": [0, 2], "b": [1]}),
        ({"exclude_str": "a:1@b"}, {"a": [0, 2]}),
        ({"exclude_str": "a@b"}, {}),
    ],
)
def test_a_choice_leaves_slots_in_the_order_of_the_hosts(choice, left):
    found = parse_resource_filter(HOSTS, **choice)
    assert found == left and list(found) == list(left)


def test_a_choice_that_cannot_be_met_is_an_error():
    with pytest.raises(ConfigError, match="no host 'c'"):
        parse_resource_filter(HOSTS, include_str="c")
    with pytest.raises(ConfigError, match="give one of them"):
        parse_resource_filter(HOSTS, include_str="a", exclude_str="b")
    with pytest.raises(ConfigError, match="give one pair"):
        main(["--num_nodes", "1", "-i", "localhost", "train.py"])


def test_cores_are_listed_once_in_ascending_order():
    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for text in ("2-4,4", "3,1", "4-2", "a", ""):
        with pytest.raises(ConfigError, match="Write cores"):
            parse_range_list(text)
