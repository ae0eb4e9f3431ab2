"""One Chromium for all tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import devtools
import pytest
import samples

from ddpdoctor.report.html import write_html
from tests.conftest import Once


@pytest.fixture(scope="session")
def browser() -> Iterator[devtools.Tab]:
    with devtools.opened() as found:
        yield found


@pytest.fixture
def tab(browser: devtools.Tab) -> Iterator[devtools.Tab]:
    """The browser's page, in its initial state."""
    yield browser
    browser.ask("Emulation.setScriptExecutionDisabled", value=False)
    browser.ask("Emulation.setEmulatedMedia", media="", features=[])
    browser.ask("Emulation.clearDeviceMetricsOverride")


@pytest.fixture(scope="session")
def pages(once: Once) -> Path:
    """A folder with the report of each sample."""

    def write(folder: Path) -> None:
        for name, sample in samples.ALL.items():
            write_html(sample(), folder / f"{name}.html")

    return once("reports", write)
