"""Finding, fetching and verifying: against small data sets of the real form on a real server."""

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from seht.lab.data import files
from seht.lab.data.files import SOURCES, Archive, DataError, File, Source, find

CONTENT = {"set/one": b"one" * 100_000, "set/two": b"two" * 70_000}


def sha(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def tarred(content):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in {**content, "set/unknown": b"not asked for"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


class Server:
    """Serves `content` by path and counts; `cut` announces a file and sends half of it."""

    def __init__(self):
        self.content, self.requests, self.cut = {}, [], 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests.append(self.path)
                if self.path not in outer.content:
                    self.send_error(404)
                    return
                body = outer.content[self.path]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if outer.cut:
                    outer.cut -= 1
                    body = body[: len(body) // 2]
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test sees the user's cache or data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SEHT_DATA", raising=False)
    return tmp_path / "cache" / "seht"


@pytest.fixture
def archived(server, monkeypatch):
    """A data set in an archive; one file has an MD5, as CIFAR-100's have."""
    body = server.content["/set.tar.gz"] = tarred(CONTENT)
    source = Source(
        {
            "one": File("set/one", sha(CONTENT["set/one"])),
            "two": File("set/two", md5(CONTENT["set/two"])),
        },
        Archive("set.tar.gz", sha(body), f"{server.url}/set.tar.gz", 1),
    )
    monkeypatch.setitem(SOURCES, "archived", source)
    return source


@pytest.fixture
def single(server, monkeypatch):
    """A data set of files by themselves, as WikiText-2."""
    made = {}
    for path, body in CONTENT.items():
        server.content[f"/{path}"] = body
        made[path[-3:]] = File(path, sha(body), f"{server.url}/{path}")
    monkeypatch.setitem(SOURCES, "single", Source(made))
    return SOURCES["single"]


def put(directory, **changed):
    for path, body in CONTENT.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(changed.get(path[-3:], body))
    return directory


def right(paths, below):
    assert {key: path.read_bytes() for key, path in paths.items()} == {
        "one": CONTENT["set/one"],
        "two": CONTENT["set/two"],
    }
    assert all(below in path.parents for path in paths.values())


def leftovers(directory):
    """Files that are no part of the data set."""
    known = {directory / path for path in CONTENT}
    return [p for p in directory.rglob("*") if p.is_file() and p not in known]


@pytest.mark.parametrize("name", ["archived", "single"])
def test_fetched_once_and_kept(name, archived, single, server, cache, capsys):
    right(find(name), cache)
    assert leftovers(cache) == []  # no archive, no temporary file, nothing that was not asked for
    assert "fetching http" in capsys.readouterr().err
    asked = len(server.requests)
    right(find(name), cache)
    assert len(server.requests) == asked == (1 if name == "archived" else 2)


@pytest.mark.parametrize("name", ["archived", "single"])
def test_places_in_their_order(name, archived, single, server, cache, tmp_path, monkeypatch):
    right(find(name), cache)
    elsewhere = put(tmp_path / "elsewhere")
    monkeypatch.setenv("SEHT_DATA", str(elsewhere))
    right(find(name), elsewhere)
    given = put(tmp_path / "given")
    right(find(name, given), given)
    right(find(name, str(given)), given)
    empty = tmp_path / "empty"
    empty.mkdir()
    right(find(name, empty), elsewhere)
    monkeypatch.setenv("SEHT_DATA", str(empty))
    right(find(name), cache)


def test_archive_in_the_data_directory(archived, server, cache, tmp_path):
    (tmp_path / "set.tar.gz").write_bytes(server.content["/set.tar.gz"])
    right(find("archived", tmp_path), cache)
    assert not server.requests
    assert (tmp_path / "set.tar.gz").exists()  # the user's own is not ours to remove

    (tmp_path / "set.tar.gz").write_bytes(b"something else")
    right(find("archived", tmp_path), cache)  # not needed any more
    (cache / "set/one").unlink()
    with pytest.raises(
        DataError, match=f"set.tar.gz is cut short or altered: {archived.archive.hash}"
    ):
        find("archived", tmp_path)


@pytest.mark.parametrize("name", ["archived", "single"])
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"X" + b[1:], lambda b: b + b"X", lambda b: b""]
)
def test_damaged_files_are_named(name, damage, archived, single, server, tmp_path, monkeypatch):
    place = put(tmp_path / "place", two=damage(CONTENT["set/two"]))
    expected = SOURCES[name].files["two"].hash
    for call in (lambda: find(name, place), lambda: find(name)):
        with pytest.raises(DataError) as error:
            call()
        text = str(error.value)
        assert str(place / "set/two") in text and expected in text and "replace it" in text
        assert "\n" not in text
        monkeypatch.setenv("SEHT_DATA", str(place))
    assert not server.requests  # a user's damaged file is not passed over in silence


def test_a_missing_file_is_named(archived, server, tmp_path):
    place = put(tmp_path / "place")
    (place / "set/one").unlink()
    with pytest.raises(DataError, match=f"set/one is missing .{archived.files['one'].hash}"):
        find("archived", place)
    assert not server.requests


def test_damage_in_the_cache(archived, cache):
    find("archived")
    (cache / "set/one").write_bytes(b"damaged")
    with pytest.raises(DataError, match="set/one is cut short or altered"):
        find("archived")


@pytest.mark.parametrize("name", ["archived", "single"])
def test_what_the_cache_lacks_is_fetched(name, archived, single, cache):
    find(name)
    (cache / "set/one").unlink()
    right(find(name), cache)


@pytest.mark.parametrize("name, path", [("archived", "/set.tar.gz"), ("single", "/set/one")])
def test_an_altered_download_is_not_kept(name, path, archived, single, server, cache):
    server.content[path] = b"X" + server.content[path][1:]
    with pytest.raises(DataError) as error:
        find(name)
    expected = (SOURCES[name].archive or SOURCES[name].files["one"]).hash
    assert expected in str(error.value) and "nothing was kept" in str(error.value)
    assert leftovers(cache) == [] and not (cache / "set/one").exists()


@pytest.mark.parametrize("name", ["archived", "single"])
def test_a_connection_that_breaks_is_tried_again(name, archived, single, server, cache):
    server.cut = files.TRIES - 1
    right(find(name), cache)


@pytest.mark.parametrize("name", ["archived", "single"])
def test_a_connection_that_keeps_breaking(name, archived, single, server, cache):
    server.cut = 100
    with pytest.raises(DataError, match=r"failed .* name the directory in --data-dir or SEHT_DATA"):
        find(name)
    assert leftovers(cache) == []
    server.cut = 0
    right(find(name), cache)


@pytest.mark.parametrize("name", ["archived", "single"])
def test_no_connection(name, archived, single, server, cache, tmp_path):
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(DataError) as error:
        find(name, tmp_path)
    text = str(error.value)
    wanted = SOURCES[name].archive or SOURCES[name].files["one"]
    assert wanted.url in text and wanted.hash in text and str(tmp_path) in text
    assert "\n" not in text


def test_not_on_the_server(archived, server):
    server.content.clear()
    with pytest.raises(DataError, match="404"):
        find("archived")
    assert len(server.requests) == 1  # asking again would not help


def test_archive_whose_files_are_others(archived, server, cache, monkeypatch):
    """The archive has its checksum and the files do not: a mistake in our list, or worse."""
    body = tarred({**CONTENT, "set/two": b"another two"})
    server.content["/set.tar.gz"] = body
    wrong = Archive("set.tar.gz", sha(body), archived.archive.url, 1)
    monkeypatch.setitem(SOURCES, "archived", Source(archived.files, wrong))
    with pytest.raises(DataError, match="set/two came out of its archive as md5:"):
        find("archived")
    assert not (cache / "set/two").exists()
    assert [p for p in cache.rglob(".part-*")] == []


KILLED = """
import json, os, sys
from seht.lab.data import files

names, archive = json.loads(sys.argv[1])
known = {key: files.File(*value) for key, value in names.items()}
files.SOURCES["archived"] = files.Source(known, files.Archive(*archive))

def digest(path, algorithm, before=files.digest):
    if path.parent.name.startswith(".part-") and path.name == "two":
        os.kill(os.getpid(), 9)
    return before(path, algorithm)

files.digest = digest
files.find("archived")
"""


def test_killed_while_fetching(archived, server, cache):
    """What a killed process leaves behind is never taken for data."""
    names = {key: (file.path, file.hash) for key, file in archived.files.items()}
    archive = archived.archive
    given = json.dumps([names, (archive.name, archive.hash, archive.url, 1)])
    died = subprocess.run([sys.executable, "-c", KILLED, given], capture_output=True)
    assert died.returncode == -9, died.stderr
    assert (cache / "set/one").exists() and not (cache / "set/two").exists()
    right(find("archived"), cache)


def test_progress_bar(archived, server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    find("archived")
    assert "100%" in capsys.readouterr().err


def test_unwritable_cache(archived, cache):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"a file where the directory should be")
    with pytest.raises(DataError, match="failed"):
        find("archived")


def test_wrong_names(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        find("cifar-10")
    with pytest.raises(DataError, match=r"--data-dir names .*nowhere, which is not a directory"):
        find("cifar10", tmp_path / "nowhere")
    monkeypatch.setenv("SEHT_DATA", str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"SEHT_DATA names .*typo, which is not a directory"):
        find("cifar10")


def test_the_lists_are_complete():
    """Every file has a checksum of full length and somewhere to come from, over TLS."""
    for source in SOURCES.values():
        assert source.archive or all(file.url for file in source.files.values())
        for thing in [*source.files.values(), *([source.archive] if source.archive else [])]:
            algorithm, _, digits = thing.hash.partition(":")
            assert len(bytes.fromhex(digits)) == hashlib.new(algorithm).digest_size
            assert thing.url is None or thing.url.startswith("https://")
        assert not any(
            Path(file.path).is_absolute() or ".." in file.path for file in source.files.values()
        )


def test_home_is_understood(archived, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = put(tmp_path / "data")
    right(find("archived", os.path.join("~", "data")), place)
