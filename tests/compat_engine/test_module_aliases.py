"""DeepSpeed's import paths, and earlier ones, are this package's own modules, not copies of them."""

from importlib import import_module

import pytest

from megatron_ds.compat.deepspeed.aliases import ALIASES, target_of

pytestmark = pytest.mark.plan


def test_an_alias_is_the_module_itself():
    same = [
        import_module(f"megatron_ds.{alias}") is import_module(f"megatron_ds.{module}")
        for alias, module in ALIASES.items()
    ]
    assert len(same) == 10 and all(same)


def test_modules_below_the_alias_of_a_package_are_those_of_the_package():
    assert target_of("megatron_ds.engine.zero_init") == (
        "megatron_ds.compat.engine.zero_init"
    )
    from megatron_ds.engine.zero_init import Init as same

    from megatron_ds.compat.engine.zero_init import Init

    assert same is Init


def test_what_is_no_alias_has_one_path():
    assert target_of("megatron_ds.zero") is target_of("torch.nn") is None
    with pytest.raises(ModuleNotFoundError):
        import_module("megatron_ds.engine.no_such_module")
