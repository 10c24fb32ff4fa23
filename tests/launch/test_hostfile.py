"""Hostfiles and the choice of slots: DeepSpeed's own functions answer the same, but where they have a defect."""

import logging
import random
from collections import Counter

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.launch.hostfile import chosen_slots, limited, parse_hostfile

pytestmark = pytest.mark.plan

HOSTS = ("n1", "n2", "worker-3", "10.0.0.4", "node.four")
CASES = 10_000


@pytest.fixture(scope="module")
def theirs():
    """DeepSpeed's launcher."""
    runner = pytest.importorskip("deepspeed.launcher.runner")
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    return runner


def outcome(function, *args):
    """What a function returns, as plain lists; "error" if it raises what a user can read."""
    try:
        found = function(*args)
    except (ConfigError, ValueError):
        return "error"
    return [
        (host, slots if isinstance(slots, int) else list(slots))
        for host, slots in found.items()
    ]


def random_hostfile(draw: random.Random) -> list[str]:
    lines = []
    for _ in range(draw.randrange(6)):
        host = draw.choice(HOSTS)
        space = draw.choice((" ", "  ", "\t"))
        count = draw.choice(("0", "1", "2", "4", "08", "", "x", "-1"))
        after = draw.choice(("", "", " max-slots=8", " # a comment", "x"))
        line = f"{host}{space}slots={count}{after}"
        before = draw.choice(("", "", "", " ", "#", "# "))
        lines.append(before + line + "\n")
        if draw.random() < 0.3:
            lines.append(draw.choice(("\n", "# comment\n", "  \n", "n5\n", "n6 4\n")))
    return lines


def random_choice(draw: random.Random, hosts: list[str]) -> str:
    words = []
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        host = draw.choice((*hosts, *hosts, *hosts, "absent"))
        numbers = [str(draw.randrange(5)) for _ in range(draw.randrange(1, 4))]
        listed = draw.choice(
            ("", "", ":" + ",".join(numbers), ":", ":a", ":0:1", ":1,")
        )
        words.append(host + listed)
    return "@".join(words)


def test_random_hostfiles_are_read_alike(theirs):
    draw = random.Random(1)
    found = Counter()
    for _ in range(CASES):
        lines = random_hostfile(draw)
        ours = outcome(parse_hostfile, lines)
        assert ours == outcome(theirs._parse_hostfile, lines), lines
        found["error" if ours == "error" else "hosts"] += 1
    assert min(found.values()) > CASES / 10


def test_random_choices_are_made_alike_except_where_theirs_leaves_nothing(theirs):
    """Theirs returns no host where everything is excluded, and then fails without a reason: an error here."""
    draw = random.Random(2)
    found = Counter()
    for _ in range(CASES):
        hosts = {
            host: draw.randrange(1, 5)
            for host in draw.sample(HOSTS, draw.choice((1, 1, 2, 3, 5)))
        }
        include = random_choice(draw, [*hosts]) if draw.random() < 0.6 else ""
        exclude = random_choice(draw, [*hosts]) if draw.random() < 0.4 else ""
        ours = outcome(chosen_slots, hosts, include, exclude)
        other = outcome(theirs.parse_inclusion_exclusion, hosts, include, exclude)
        if other == []:
            found["everything excluded"] += 1
            assert ours == "error", (hosts, include, exclude)
            continue
        assert ours == other, (hosts, include, exclude)
        found["error" if ours == "error" else "slots"] += 1
    assert min(found.values()) > CASES / 200, found


def test_random_counts_are_applied_alike_except_to_more_nodes_or_slots_than_there_are(
    theirs,
):
    """Theirs takes fewer nodes than asked for without a word: an error here."""
    draw = random.Random(3)
    for _ in range(CASES):
        hosts = {host: draw.randrange(1, 5) for host in draw.sample(HOSTS, 3)}
        nodes, per_node = draw.choice((None, 1, 2, 3, 4)), draw.choice((None, 1, 2, 6))
        slots = chosen_slots(hosts)
        ours = outcome(limited, slots, nodes, per_node)
        if nodes is not None and nodes > len(hosts):
            assert ours == "error"
            continue
        asked = (-1 if nodes is None else nodes, -1 if per_node is None else per_node)
        lists = {host: list(found) for host, found in slots.items()}
        assert ours == outcome(theirs.apply_num_nodes_and_gpus, lists, *asked)


@pytest.mark.parametrize(
    "include, exclude, left",
    [
        ("n1", "", {"n1": (0, 1, 2, 3)}),
        ("n1:0,2", "", {"n1": (0, 2)}),
        ("n1@n2:1,3", "", {"n1": (0, 1, 2, 3), "n2": (1, 3)}),
        ("n2:3,1,1@n2:0", "", {"n2": (0, 1, 3)}),
        ("n2@n1:0", "", {"n1": (0,), "n2": (0, 1, 2, 3)}),
        ("", "n1", {"n2": (0, 1, 2, 3)}),
        ("", "n2:0,3", {"n1": (0, 1, 2, 3), "n2": (1, 2)}),
        ("", "n1:0,1,2,3", {"n2": (0, 1, 2, 3)}),
    ],
)
def test_hosts_and_slots_are_chosen_in_the_order_of_the_hostfile(
    include, exclude, left
):
    found = chosen_slots({"n1": 4, "n2": 4}, include, exclude)
    assert list(found.items()) == list(left.items())


@pytest.mark.parametrize(
    "text, message",
    [
        ("n3", "no host 'n3' in the hostfile"),
        ("n1:7", "n1 has 4 slots, numbered from 0; there is no slot 7"),
        ("n1:a", "'a' is no list of slots"),
        ("n1:", "'' is no list of slots"),
        ("n1:0:1", "'0:1' is no list of slots"),
    ],
)
def test_a_choice_that_fits_no_host_names_the_reason(text, message):
    with pytest.raises(ConfigError, match=message):
        chosen_slots({"n1": 4, "n2": 4}, include=text)


def test_a_line_that_is_wrong_is_named_with_its_number():
    with pytest.raises(ConfigError, match="line 2: 'n2 4' is not HOST slots=NUMBER"):
        parse_hostfile(["n1 slots=4", "n2 4"])
    with pytest.raises(ConfigError, match="line 3: n1 is listed twice"):
        parse_hostfile(["n1 slots=4", "", "n1 slots=2"])
    for slots in (99999999, 4097):
        with pytest.raises(ConfigError, match=f"line 1: slots={slots} are more"):
            parse_hostfile([f"n1 slots={slots}"])


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "n[1-2]", "n1,n2"])
def test_names_that_ssh_or_pdsh_would_take_for_something_else_are_refused(name):
    """Theirs passes them on: an option of ssh, or hosts whose numbers are wrong."""
    with pytest.raises(ConfigError, match="not the name of one host"):
        parse_hostfile([f"{name} slots=2"])


def test_hosts_without_slots_are_an_error():
    with pytest.raises(ConfigError, match="none of n1, n2 has a slot"):
        chosen_slots({"n1": 0, "n2": 0})


@pytest.mark.plan
def test_a_host_that_is_misspelt_is_named_with_the_nearest_one():
    message = r"no host 'nod1' in the hostfile; did you mean 'node1'\?$"
    with pytest.raises(ConfigError, match=message):
        chosen_slots({"node1": 2}, "nod1")
    with pytest.raises(ConfigError, match=r"in the hostfile\. The hosts are node1\."):
        chosen_slots({"node1": 2}, "other")
