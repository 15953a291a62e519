"""Photograph the pages of the documentation in headless Chromium, and keep them small.

python scripts/figures/screenshots.py doctor          runs `seht doctor` on digits with wrong labels
python scripts/figures/screenshots.py demo runs/demo  the page that `make demo` has written
python scripts/figures/screenshots.py site site       what `make docs` has built, desk and phone
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests" / "kit"))

from chromium import Chromium  # noqa: E402


class DigitNet(nn.Sequential):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip


def loss_fn(model, batch):
    """Cross-entropy, as everybody writes it."""
    return F.cross_entropy(model(batch[0]), batch[1])


def example():
    """The patient: 240 digits, 4 in 10 labels drawn anew, learnt by heart; 60 more held out."""
    torch.manual_seed(0)
    digits = load_digits()
    chosen = torch.randperm(1797)[:300]
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[chosen] / 16
    y = torch.tensor(digits.target)[chosen]
    y = torch.where(torch.rand(300) < 0.4, torch.randint(0, 10, (300,)), y)
    train = DataLoader(TensorDataset(x[:240], y[:240]), 48, shuffle=True)
    held_out = DataLoader(TensorDataset(x[240:], y[240:]), 60)
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(60):
        for batch in train:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    return model, loss_fn, train, held_out


def doctor() -> None:
    """The page of a real run of the command."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "doctor.html"
        command = [sys.executable, "-m", "seht", "doctor", "screenshots:example", "--html", page]
        subprocess.run(command, cwd=Path(__file__).parent, check=True)
        keep(photograph(page, 1180, 1560), IMAGES / "doctor.png")


def demo(directory: str) -> None:
    """The beginning of the report."""
    keep(photograph(Path(directory) / "report.html", 1280, 1500), IMAGES / "demo.png")


def site(directory: str) -> None:
    """The first page on a desk by day, another on a phone by night, side by side."""
    desk = photograph(Path(directory) / "index.html", 1280, 900)
    phone = photograph(Path(directory) / "frozen-decisions.html", 390, 900, dark=True)
    both = Image.new("RGB", (desk.width + 24 + phone.width, 900), "#e4e7ec")
    both.paste(desk, (0, 0))
    both.paste(phone, (desk.width + 24, 0))
    keep(both, IMAGES / "site.png")


def photograph(page: Path, width: int, height: int | None = None, *, dark: bool = False):
    """The whole page, or its first ``height`` pixels."""
    browser = Chromium()
    try:
        browser.open(page, width=width, height=height or 844, dark=dark)
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            browser.screenshot(file.name, full=height is None)
            return Image.open(file.name).convert("RGB")
    finally:
        browser.close()


def keep(image, file: Path) -> None:
    """With a palette: pages have few colours."""
    image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {image.width} x {image.height}, {file.stat().st_size:,} B")


if __name__ == "__main__":
    kinds = {"doctor": doctor, "demo": demo, "site": site}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    kinds[sys.argv[1]](*sys.argv[2:])
