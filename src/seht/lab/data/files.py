"""Find the files of a data set, or fetch them; nothing is opened before its checksum is right.

    paths = find("cifar10")      # {"data_batch_1": Path(...), ...}

They are looked for in ``data_dir``, in ``$SEHT_DATA`` and in the cache; there as files, or as the
official archive. What is in none of them is fetched from its official source into the cache.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from seht.errors import brief, unknown

TIMEOUT = (10, 30)  # seconds to connect, and without a byte
TRIES = 3


class DataError(ValueError):
    """A file that is missing, cut short or altered, and what to do about it, in one line."""


def find(name: str, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """The verified files of a data set, by the names in :data:`SOURCES`."""
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


def places_of(data_dir: str | os.PathLike[str] | None) -> tuple[str | None, str | None]:
    """What decides where files are found: part of the key of every cache of what was read."""
    return str(data_dir) if data_dir else None, os.environ.get("SEHT_DATA")


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
    import pooch

    return f"{algorithm}:{pooch.file_hash(str(path), alg=algorithm)}"


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
            f"{name} is not in {looked}, and fetching {wanted.url} failed ({brief(error)}); "
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


# --- archives ---------------------------------------------------------------------------------


def _extract(archive: Path, source: Source, to: Path) -> None:
    """Take the known files, and only those, out of the archive; each appears when verified."""
    assert source.archive is not None
    verify(archive, source.archive.hash)
    try:
        to.mkdir(parents=True, exist_ok=True)
        apart = partial(tempfile.TemporaryDirectory, dir=to, prefix=".part-")
        with tarfile.open(archive) as tar, apart() as part:
            for key, file in source.files.items():
                content = tar.extractfile(file.path)
                assert content is not None, f"{file.path} is a directory"
                new, place = Path(part, key), to / file.path
                new.write_bytes(content.read())
                if (found := digest(new, file.hash.partition(":")[0])) != file.hash:
                    raise DataError(
                        f"{file.path} came out of its archive as {found}, not {file.hash}"
                    )
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(new, place)
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked into {to} ({brief(error)}); make room there, or unpack "
            "it yourself and name the directory in --data-dir or SEHT_DATA"
        ) from error


# --- where each data set comes from -----------------------------------------------------------

# The archives' SHA-256 and the MD5 of the CIFAR files are those their users agree on (Keras and
# torchvision publish them); the SHA-256 of the CIFAR-10 and WikiText-2 files were computed from
# files that have these MD5s, and from those the word-level language modelling example of PyTorch
# has always trained on.


@dataclass(frozen=True)
class File:
    """One file: where it lies below a data directory, and what it has to be."""

    path: str
    hash: str
    """``algorithm:hexadecimal digits``."""
    url: str | None = None
    """Where it can be fetched by itself; ``None`` if it comes in an archive."""


@dataclass(frozen=True)
class Archive:
    """A tar archive that holds all files of a data set."""

    name: str
    hash: str
    url: str
    megabytes: int


@dataclass(frozen=True)
class Source:
    """A data set's files by the names the loaders use, and how to get them."""

    files: dict[str, File]
    archive: Archive | None = None


def _files(path: str, algorithm: str, url: str | None = None, **sums: str) -> dict[str, File]:
    """Files whose path, and address, differ only in their names."""
    return {
        name: File(path.format(name), f"{algorithm}:{digits}", url and url.format(name))
        for name, digits in sums.items()
    }


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        _files(
            "cifar-10-batches-py/{}",
            "sha256",
            data_batch_1="54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
            data_batch_2="766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
            data_batch_3="0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
            data_batch_4="3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
            data_batch_5="d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
            test_batch="f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
        ),
        Archive(
            "cifar-10-python.tar.gz",
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            170,
        ),
    ),
    "cifar100": Source(
        _files(
            "cifar-100-python/{}",
            "md5",
            train="16019d7e3df5f24257cddd939b257f8d",
            test="f0ef6b0ae62326f3e7ffdfab6717acfc",
        ),
        Archive(
            "cifar-100-python.tar.gz",
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            169,
        ),
    ),
    # The original archive's server is gone. These are the same texts, at a commit that stays.
    "wikitext2": Source(
        _files(
            "wikitext-2/{}.txt",
            "sha256",
            "https://raw.githubusercontent.com/pytorch/examples/"
            "acc295dc7b90714f1bf47f06004fc19a7fe235c4/word_language_model/data/wikitext-2/{}.txt",
            train="9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            valid="f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            test="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        )
    ),
}
"""Every data set that is made of files; the others come with Python packages."""
