"""Import paths of documents and of users' programs go on working after a module has moved."""

from importlib import import_module

import pytest

from megatron_ds.compat.moved_modules import MOVED, MOVED_PACKAGES, new_path

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("old, new", {**MOVED, **MOVED_PACKAGES}.items())
def test_the_old_path_is_the_moved_module_itself(old, new):
    assert import_module(f"megatron_ds.{old}") is import_module(f"megatron_ds.{new}")


def test_modules_below_a_moved_package_move_with_it():
    assert (
        new_path("megatron_ds.engine.zero_init")
        == "megatron_ds.compat.engine.zero_init"
    )
    from megatron_ds.engine.zero_init import Init as same

    from megatron_ds.compat.engine.zero_init import Init

    assert same is Init


def test_what_has_not_moved_has_one_path():
    assert new_path("megatron_ds.zero") is new_path("torch.nn") is None
    with pytest.raises(ModuleNotFoundError):
        import_module("megatron_ds.engine.no_such_module")
