"""Options that need another one: refused without it, accepted with it, named in help and on the flags page."""

import dataclasses

import pytest

from megatron_ds.config.messages import needed, problems_of
from megatron_ds.config.options.need import OFF, holds, need
from megatron_ds.config.rules.need import needs
from megatron_ds.config.run import RunConfig, Source, all_options
from megatron_ds.config.sources.config_text import explanation

pytestmark = pytest.mark.plan

NEEDY = [path for path, option in all_options().items() if option.needs]


def another_value(path: str):
    """A value of the option that is not its default."""
    option = all_options()[path]
    if option.choices:
        return next(value for value in option.choices if value != option.default)
    if option.kind is bool:
        return not option.default
    value = {int: 7, float: 0.75, str: "text"}[option.kind]
    return (value,) if option.is_list else value


def value_that_turns_on(path: str, values: tuple):
    if not values:
        return another_value(path)
    is_list = all_options()[path].is_list
    return (values[-1],) if is_list else values[-1]


def with_value(config: RunConfig, path: str, value) -> RunConfig:
    changed = config.with_values({path: value}, Source("flag", "--flag"))
    return dataclasses.replace(changed, sources={})


def about(path: str, config: RunConfig) -> list[str]:
    flag = all_options()[path].flag
    return [text for text in problems_of([needs], config) if f"remove {flag}." in text]


def test_many_options_state_what_they_need():
    assert len(NEEDY) > 80


@pytest.mark.parametrize("path", NEEDY)
def test_an_option_without_what_it_needs_is_refused_and_with_it_accepted(path):
    config = RunConfig()
    wanted = all_options()[path].needs
    for other, values in wanted.choices:  # turned off where it is on by default
        if holds(config.get(other), values):
            off = next(value for value in OFF if not holds(value, values))
            config = with_value(config, other, off)

    alone = with_value(config, path, another_value(path))
    (problem,) = about(path, alone)
    for words in needed(wanted):
        assert words in problem and words in explanation(all_options()[path])
    for other, values in wanted.choices:
        together = with_value(alone, other, value_that_turns_on(other, values))
        assert about(path, together) == []


def test_options_that_lack_the_same_are_one_problem():
    config = RunConfig()
    for path in ("data.fim_rate", "data.fim_spm_rate"):
        config = with_value(config, path, 0.25)
    assert list(problems_of([needs], config)) == [
        "--fim-rate 0.25 (default) and --fim-spm-rate 0.25 (default) have no effect without --fim-data. Add "
        "--fim-data, or remove these options."
    ]


def test_a_need_names_options_that_exist():
    for path in NEEDY:
        for other, values in all_options()[path].needs.choices:
            option = all_options()[other]
            assert not option.choices or set(values) <= set(option.choices), path


def test_an_item_of_a_list_meets_a_need():
    assert holds(("p2p", "a2a+p2p"), ("a2a+p2p",)) and not holds(("p2p",), ("a2a",))
    either = need("a.b") | need("c.d", 1)
    assert either.choices == (("a.b", ()), ("c.d", (1,)))
