"""Which tests a worker of pytest-xdist takes together, and which first."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a module's fixture, such as one recorded job, are one worker's: else each worker would make it.

    Real jobs come first, so that no worker is left with a long one when the others have nothing to do. All this must be known before
    pytest-xdist reads the groups, at this same moment.
    """
    for item in items:
        if _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("torchrun") is None)


def _shares_a_fixture(item: pytest.Item) -> bool:
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs.values() if info else ()
    return any(each.scope == "module" for chain in definitions for each in chain)
