"""Options, and the plugin `worker` in each process that runs tests."""

import importlib
from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(path.stem for path in (Path(__file__).parent / "support").glob("*.py")))


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run one in so many of the selected tests, for slow tools")


def pytest_configure(config):
    """A process that only hands tests out to others starts these at once, without importing torch first."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(importlib.import_module("worker"))
