"""Settings every test shares: one thread, fixed seeds, and how hard hypothesis tries."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["support_plugin", "pytester"]

EVERYTHING = os.environ.get("SEHT_TESTS") == "all"  # `make test-all` sets it

# The fast run is the same on every machine and every day; the long one looks further each time.
slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=20, derandomize=True, **slow_is_fine)
settings.register_profile("all", max_examples=1000, print_blob=True, **slow_is_fine)
settings.load_profile("all" if EVERYTHING else "fast")

# The tensors are small, and the test processes already fill the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interactive():
    # A process in the background of a shell ignores Ctrl-C, and so would the tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A command of ``seht`` in an empty directory: its exit code and what it has printed."""
    from seht import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
