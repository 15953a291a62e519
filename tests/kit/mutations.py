"""Records as bad disks, other programs and tired people leave them: mutations of JSON and CSV."""

import copy
import json
import random

VALUES = [
    None,
    True,
    -1,
    0,
    10**400,
    -(10**400),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "nan",
    "<b>",
    "\u0663",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": {"b": [1, {"c": None}]}},
    {"": 1},
]


def places(value, path=()):
    """The path of everything inside a value."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, new):
    """A copy with another value, or none, at a path."""
    if not path:
        return new
    found = copy.deepcopy(value)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    if new is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = new
    return found


def of_json(text, seed):
    """One mutation of a JSON text, as bytes."""
    draw = random.Random(seed)
    kind = draw.randrange(10)
    data = text.encode()
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        at = draw.randrange(len(data))
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return draw.choice(
            [b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}\n{}"]
        )
    value = json.loads(text)
    path = draw.choice(list(places(value)))
    new = ... if kind == 3 and path else draw.choice(VALUES)
    return json.dumps(changed(value, path, new)).encode()


def of_csv(text, seed):
    """One mutation of a table, as bytes."""
    draw = random.Random(seed)
    lines = text.splitlines()
    kind = draw.randrange(6)
    if kind == 0:
        return text.encode()[: draw.randrange(len(text))]
    if kind == 1:
        return draw.choice([b"", b"\n", b"\xff", b"epoch\n", b"\0,\0\n", b'"', b"a,a\n1,2\n"])
    row, column = draw.randrange(len(lines)), draw.randrange(lines[0].count(",") + 1)
    cells = lines[row].split(",")
    words = ["", "x", "nan", "inf", "-1", "1e400", "9" * 5000, "\u0663", '"', "1;2", "\u00e9"]
    cells[column] = draw.choice(words)
    lines[row] = ",".join(cells)
    return "\n".join(lines).encode()
