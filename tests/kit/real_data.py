"""Marks for tests on the real data sets: they run where SEHT_DATA names a directory with them."""

import os
from pathlib import Path

import pytest

from seht.lab.data.files import SOURCES

PLACE = Path(os.environ.get("SEHT_DATA") or "nowhere")


def there(name):
    return all((PLACE / file.path).exists() for file in SOURCES[name].files.values())


def needs(name):
    return pytest.mark.skipif(not there(name), reason=f"SEHT_DATA names no directory with {name}")
