"""A notebook as it stands, with its outputs, in Markdown."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def as_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by name."""
    images: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                parts += _output(output, path.stem, images)
    note = f"*This page is the notebook [`{path.name}`]({path.name}) with its outputs.*"
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n", images


def _output(output: dict[str, Any], stem: str, images: dict[str, bytes]) -> list[str]:
    if output["output_type"] == "stream":
        return [_block("".join(output["text"]))]
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{stem}-{len(images)}.png"
        images[name] = base64.b64decode("".join(data["image/png"]))
        return [f"![a figure of the notebook]({name})"]
    if "text/plain" in data:
        return [_block("".join(data["text/plain"]))]
    return []


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
