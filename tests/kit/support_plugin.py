"""pytest's side of the support matrix (see ``support.py``): marks in, ``--matrix PATH`` out."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import support

DECLARED = pytest.StashKey[list[support.Cell]]()
COMPLETE = pytest.StashKey[bool]()
RAN = pytest.StashKey[dict[str, tuple[list[support.Cell], str]]]()


def pytest_addoption(parser):
    parser.addoption("--matrix", metavar="PATH", help="write the support matrix (with -m supports)")


def pytest_configure(config):
    config.stash[DECLARED], config.stash[RAN] = [], {}
    config.stash[COMPLETE] = [config.rootpath / a for a in config.args] == [support.TESTS]


@pytest.hookimpl(tryfirst=True)  # before slow tests and others are deselected
def pytest_collection_modifyitems(config, items):
    for item in items:
        if cells := support.declared(item):
            # Travels with the report, between processes as plain lists.
            item.user_properties.append(("supports", [list(cell) for cell in cells]))
            config.stash[DECLARED] += cells


class _Watch:
    """Needs the configuration, which reports do not carry."""

    def __init__(self, config):
        self.config = config

    def pytest_collectreport(self, report):
        if not report.passed:  # a module that is skipped for want of a package declares nothing
            self.config.stash[COMPLETE] = False

    def pytest_runtest_logreport(self, report):
        for name, cells in report.user_properties:
            if name == "supports" and (report.when == "call" or not report.passed):
                cells = [support.Cell(*cell) for cell in cells]
                self.config.stash[RAN][report.nodeid] = (cells, report.outcome)


def pytest_sessionstart(session):
    session.config.pluginmanager.register(_Watch(session.config))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    config = session.config
    path = config.getoption("--matrix")
    if not path or hasattr(config, "workerinput"):
        return
    chosen = config.option.keyword or config.option.markexpr != "supports"
    if exitstatus != 0 or chosen or not config.stash[COMPLETE]:
        raise pytest.UsageError(
            f"{path} is not written: run all marked tests (-m supports, no -k, no paths) with "
            "every package, and none may fail"
        )
    ran = config.stash[RAN].values()
    cells = [(cell, outcome == "passed") for cells, outcome in ran for cell in cells]
    made_with = f"torch {version('torch').split('+')[0]}"
    support.write(Path(path), support.render(support.table(cells), made_with))
