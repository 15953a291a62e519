"""Find the files of a data set, or fetch them; nothing is opened before its checksum is right.

    paths = find("cifar10")      # {"data_batch_1": Path(...), ...}

They are looked for in ``data_dir``, in ``$SEHT_DATA`` and in the cache; there as files, or as the
official archive. What is nowhere is fetched from its official source into the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from seht.errors import unknown
from seht.lab.data.sources import SOURCES, Archive, File, Source

TIMEOUT = (10, 30)  # seconds to connect, and without a byte
TRIES = 3


class DataError(ValueError):
    """A file that is missing, cut short or altered, and what to do about it, in one line."""


def find(name: str, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """The verified files of a data set, by the names in :mod:`seht.lab.data.sources`."""
    if name not in SOURCES:
        raise DataError(unknown("data set", name, SOURCES))
    source, places = SOURCES[name], _places(data_dir)
    for place in places:
        if any((place / file.path).exists() for file in source.files.values()):
            return _verified(place, source)
        if source.archive and (place / source.archive.name).exists():
            if not _complete(cache(), source):
                _extract(place / source.archive.name, source, cache())
            return _verified(cache(), source)
    if not _complete(cache(), source):
        _fetch(name, source, cache(), places)
    return _verified(cache(), source)


def named(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """A file of the user's own; also looked for in the current directory."""
    places = [*_places(data_dir), Path()]
    found = [place / name for place in places if (place / name).is_file()]
    if not found:
        looked = ", ".join(str(place.absolute()) for place in places)
        raise DataError(f"{name} is not in {looked}; name its directory in --data-dir")
    return found[0]


def cache() -> Path:
    """Where fetched files are kept: ``seht`` in the user's cache directory."""
    import pooch

    return Path(pooch.os_cache("seht"))


def verify(path: Path, expected: str) -> None:
    """Raise unless the file is there and has the expected ``algorithm:digest``."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing ({expected} is expected, with the other files of its directory); "
            f"add it, or remove {path.parent} to have it fetched"
        )
    found = digest(path, expected.partition(":")[0])
    if found != expected:
        raise DataError(
            f"{path} is cut short or altered: {expected} is expected, not {found}; "
            f"replace it, or remove {path.parent} to have it fetched"
        )


def digest(path: Path, algorithm: str) -> str:
    """``algorithm:hexadecimal digits`` of a file."""
    made = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            made.update(block)
    return f"{algorithm}:{made.hexdigest()}"


def _places(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """The directories that users have named; a wrong name is an error."""
    places = []
    for what, named in (("--data-dir", data_dir), ("SEHT_DATA", os.environ.get("SEHT_DATA"))):
        if named:
            place = Path(named).expanduser()
            if not place.is_dir():
                raise DataError(f"{what} names {place}, which is not a directory; correct it")
            places.append(place)
    return places


def _verified(directory: Path, source: Source) -> dict[str, Path]:
    paths = {key: directory / file.path for key, file in source.files.items()}
    for key, path in paths.items():
        verify(path, source.files[key].hash)
    return paths


def _complete(directory: Path, source: Source) -> bool:
    return all((directory / file.path).exists() for file in source.files.values())


# --- fetching ---------------------------------------------------------------------------------


def _fetch(name: str, source: Source, to: Path, places: list[Path]) -> None:
    """Bring what the cache lacks; a file appears in it complete and verified, or not at all."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        if source.archive:
            archive = source.archive
            path = _download(archive.url, archive.hash, archive.name, to, f"{archive.megabytes} MB")
            _extract(path, source, to)
            path.unlink()  # its files are there, and it is as large as they are
            return
        for file in source.files.values():
            if not (to / file.path).exists():
                assert file.url is not None
                (to / file.path).parent.mkdir(parents=True, exist_ok=True)
                _download(file.url, file.hash, file.path, to)
    except OSError as error:  # requests' exceptions are among them
        looked = ", ".join(map(str, [*places, to]))
        wanted = source.archive or next(iter(source.files.values()))
        place = wanted.name if isinstance(wanted, Archive) else wanted.path
        raise DataError(
            f"{name} is not in {looked}, and fetching {wanted.url} failed ({_short(error)}); "
            f"fetch it elsewhere ({wanted.hash}), put it there as {place}, "
            "and name the directory in --data-dir or SEHT_DATA"
        ) from error


def _download(url: str, expected: str, name: str, to: Path, size: str = "") -> Path:
    """Fetch one file; pooch writes beside it and moves it when its checksum is right."""
    import pooch
    import requests

    print(f"fetching {url} {f'({size}) ' if size else ''}into {to}", file=sys.stderr)
    pooch.get_logger().setLevel("ERROR")  # it would say the same again, and suggest other options
    get = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=1 << 16, timeout=TIMEOUT)
    for attempt in range(TRIES):
        try:
            return Path(pooch.retrieve(url, expected, name, to, downloader=get))
        except ValueError as error:
            raise DataError(
                f"{url} is not the file it was: {expected} is expected; nothing was kept. Try "
                "again later, or fetch it elsewhere and name its directory in --data-dir"
            ) from error
        except (requests.HTTPError, requests.ConnectTimeout):
            raise  # it is not there, or out of reach: asking again takes long and does not help
        except OSError:
            if attempt == TRIES - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _short(error: Exception) -> str:
    """An exception's kind and first words: those of a failed connection run over lines."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"


# --- archives ---------------------------------------------------------------------------------


def _extract(archive: Path, source: Source, to: Path) -> None:
    """Take the known files, and only those, out of the archive; each is verified on its way."""
    assert source.archive is not None
    verify(archive, source.archive.hash)
    try:
        with tarfile.open(archive) as tar:
            for file in source.files.values():
                content = tar.extractfile(file.path)
                assert content is not None, f"{file.path} is a directory"
                with content, _replacing(to / file.path) as out:
                    shutil.copyfileobj(content, out)
                    out.flush()
                    _verify_new(Path(out.name), file)
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked into {to} ({_short(error)}); make room there, or unpack "
            "it yourself and name the directory in --data-dir or SEHT_DATA"
        ) from error


def _verify_new(path: Path, file: File) -> None:
    if (found := digest(path, file.hash.partition(":")[0])) != file.hash:
        raise DataError(f"{file.path} came out of its archive as {found}, not {file.hash}")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when all went well, and is gone otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
