"""Where each data set comes from, and the checksums of its files.

The archives' SHA-256 and the MD5 of the CIFAR files are those their users agree on (Keras and
torchvision publish them); the SHA-256 of the CIFAR-10 and WikiText-2 files were computed from
files that have these MD5s, and from those the word-level language modelling example of PyTorch
has always trained on.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def _cifar10() -> Source:
    sums = {
        "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
        "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
        "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
        "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
        "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
        "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
    }
    return Source(
        {k: File(f"cifar-10-batches-py/{k}", f"sha256:{v}") for k, v in sums.items()},
        Archive(
            "cifar-10-python.tar.gz",
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            170,
        ),
    )


def _cifar100() -> Source:
    sums = {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    }
    return Source(
        {k: File(f"cifar-100-python/{k}", f"md5:{v}") for k, v in sums.items()},
        Archive(
            "cifar-100-python.tar.gz",
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            169,
        ),
    )


def _wikitext2() -> Source:
    # The original archive's server is gone. These are the same texts, at a commit that stays.
    base = (
        "https://raw.githubusercontent.com/pytorch/examples/"
        "acc295dc7b90714f1bf47f06004fc19a7fe235c4/word_language_model/data/wikitext-2"
    )
    sums = {
        "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    }
    return Source(
        {k: File(f"wikitext-2/{k}.txt", f"sha256:{v}", f"{base}/{k}.txt") for k, v in sums.items()}
    )


SOURCES: dict[str, Source] = {
    "cifar10": _cifar10(),
    "cifar100": _cifar100(),
    "wikitext2": _wikitext2(),
}
"""Every data set that is made of files; the others come with Python packages."""
