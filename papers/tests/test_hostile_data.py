"""Law: a data folder of somebody else's is read within declared bounds of memory, or refused in one sentence."""

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from minimand.errors import DataError
from minimand_papers.data import formats, load, load_images, registry
from minimand_papers.experiments.vidal2018._factor import arrays_of
from minimand_papers.pictures import decoded, encoded
from minimand_papers.untrusted import matlab_arrays, npz_array
from test_data import idx, pixels, write_cifar, write_idx, write_svhn

ZEROS = 60_000_000
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def bounded(call: Callable[[], object], match: str, most: int = 12_000_000) -> None:
    """It ends in one sentence, and took no more memory than so many bytes on its way."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=match) as caught:
            call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < most


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST", 1000)


@pytest.mark.parametrize("name", [IMAGES, LABELS])
@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_unpacks_to_more(tmp_path: Path, name: str, times: int) -> None:
    """One gzip member, or several in a row."""
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / name).write_bytes(gzip.compress(bytes(ZEROS // times)) * times)
    bounded(lambda: load("mnist", tmp_path), "holds more than")


def test_a_header_that_promises_more(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    raw = struct.pack(">4B3I", 0, 0, 8, 3, 0xFFFFFFFF, 28, 28)
    (tmp_path / "mnist" / IMAGES).write_bytes(gzip.compress(raw))
    bounded(lambda: load("mnist", tmp_path), "its header promises")


def test_a_sparse_file(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    os.truncate(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", 3073 << 30)
    bounded(lambda: load("cifar10", tmp_path), "holds more than")


@pytest.mark.parametrize("compressed", [True, False])
def test_a_matlab_file_of_more(tmp_path: Path, compressed: bool) -> None:
    write_svhn(tmp_path)
    path = tmp_path / "svhn" / "train_32x32.mat"
    savemat(path, {"X": np.zeros(ZEROS, np.uint8), "y": np.ones(3)}, do_compression=compressed)
    bounded(lambda: load("svhn", tmp_path), "holds more than")


def test_a_matlab_file_that_lies_about_its_size(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    path = tmp_path / "svhn" / "train_32x32.mat"
    savemat(path, {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones(4)})
    raw = bytearray(path.read_bytes())
    raw[132:136] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(raw)
    bounded(lambda: load("svhn", tmp_path), "cut short")
    body = zlib.compress(struct.pack("<II", 14, 0xFFFFFFF0))
    path.write_bytes(bytes(raw[:128]) + struct.pack("<II", 15, len(body)) + body)
    bounded(lambda: load("svhn", tmp_path), "MATLAB 5 file, or damaged")


def element(kind: int, raw: bytes) -> bytes:
    return struct.pack("<II", kind, len(raw)) + raw + bytes(-len(raw) % 8)


def matrix(matlab_class: int, shape: tuple[int, ...], numbers: bytes, name: bytes = b"X") -> bytes:
    sizes = struct.pack(f"<{len(shape)}i", *shape)
    head = element(6, struct.pack("<II", matlab_class, 0)) + element(5, sizes) + element(1, name)
    return element(14, head + numbers)


MATRICES = {
    "a type that there is not": matrix(9, (1, 1), element(77, b"x")),
    "a class that there is not": matrix(99, (1, 1), element(2, b"x")),
    "cells": matrix(1, ((1 << 31) - 1, 1), b""),
    "a structure": matrix(2, ((1 << 31) - 1, 1), element(5, struct.pack("<i", 1)) + element(1, b"a")),
    "names of no length": matrix(2, (1, 1), element(5, bytes(4)) + element(1, b"a")),
    "letters": matrix(4, (1, (1 << 31) - 1), element(16, b"ab")),
    "a sparse matrix": matrix(
        5, ((1 << 31) - 1,) * 2, element(5, bytes(8)) + element(5, bytes(8)) + element(9, bytes(8))
    ),
    "more numbers than there are": matrix(9, (32, 32, 3, (1 << 31) - 1), element(2, b"x")),
    "a negative number of them": matrix(9, (32, 32, 3, -1), element(2, b"x")),
    "no dimensions": matrix(9, (), element(2, b"")),
    "a hundred dimensions": matrix(9, (1,) * 100, element(2, b"x")),
    "no numbers": matrix(9, (1, 1), b""),
    "complex numbers": matrix(9 | 0x800, (1, 1), element(2, b"x") + element(2, b"x")),
    "nothing": element(14, b""),
    "an element that is cut": element(14, b"\6\0\0\0\xff\0\0\0"),
}


@pytest.mark.parametrize("case", MATRICES)
def test_hostile_matrices_do_not_end_the_process(tmp_path: Path, case: str) -> None:
    write_svhn(tmp_path)
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
    labels = matrix(9, (1, 1), element(2, b"\1"), b"y")
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(head + MATRICES[case] + labels)
    bounded(lambda: load("svhn", tmp_path), "MATLAB 5 file, or damaged")


@pytest.mark.parametrize(
    "labels", [np.array(["a", "b"]), np.array([[1.5], [2]]), np.array([[np.nan], [1]]), np.array([[1], [1j]])]
)
def test_labels_that_are_none(tmp_path: Path, labels: np.ndarray) -> None:
    write_svhn(tmp_path)
    savemat(tmp_path / "svhn" / "train_32x32.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": labels})
    bounded(lambda: load("svhn", tmp_path), "whole numbers|where numbers belong|holds X of")


@pytest.mark.parametrize("name", ["cifar10", "mnist", "svhn"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_no_file_is_missing(tmp_path: Path, name: str, kind: str) -> None:
    {"cifar10": lambda: write_cifar(tmp_path, name), "svhn": lambda: write_svhn(tmp_path)}.get(
        name, lambda: write_idx(tmp_path / name)
    )()
    source = registry[name].source
    path = next(p for end in source.variants if (p := tmp_path / source.folder / (source.train[0] + end)).exists())
    path.unlink()
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path),
    }[kind]()
    bounded(lambda: load(name, tmp_path), "is incomplete, without")


# Images


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


PICTURES = {
    "too many pixels": (png(9000, 9000), "9000 × 9000 pixels, more than 67,108,864"),
    "far too many pixels": (png(60_000, 60_000), "not an image"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n", "not an image"),
    "fewer bytes than pixels": (png(4000, 4000), "not an image"),
}


@pytest.mark.parametrize("case", PICTURES)
def test_hostile_images(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "images" / "set"
    folder.mkdir(parents=True)
    raw, says = PICTURES[case]
    (folder / "a.png").write_bytes(raw)
    bounded(lambda: load_images("set", tmp_path), says)


def test_many_images_of_one_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr("minimand_papers.data.folders._LARGEST", 1_000_000)
    for number in range(20):
        Image.new("1", (500, 500)).save(tmp_path / f"{number}.png")
    bounded(lambda: load_images(tmp_path), "more than 1,000,000 bytes", 3_000_000)


def test_a_pipe_among_images_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    bounded(lambda: load_images(tmp_path), "not a regular file")


def test_pictures_in_records_are_small_and_of_two_formats() -> None:
    import base64

    image = np.linspace(0, 1, 12).reshape(3, 4)
    assert np.abs(decoded(encoded(image, lossless=True)) - image).max() < 1 / 255
    for raw in (png(3000, 3000), PICTURES["PostScript"][0], b"GIF89a" + bytes(20)):
        with pytest.raises((ValueError, OSError)):
            decoded(base64.b64encode(raw).decode())


# Arrays of the factorisation experiments


def npz(path: Path, raw: bytes, name: str = "frames.npy") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, raw)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


ANY = (None, None, None)


def test_hostile_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import minimand_papers.untrusted as untrusted

    monkeypatch.setattr(untrusted.npz_array, "__defaults__", (1_000_000,))
    path = tmp_path / "a.npz"
    honest = npy(np.zeros((2, 3, 4), np.uint8))
    cases = {
        "holds more than": npy(np.zeros((2, 1000, 1000), np.uint8)),
        "holds object": npy(np.array([{}], dtype=object)),
        "or not finite": npy(np.full((1, 1, 1), np.nan)),
        r"its frames is \(3,\)": npy(np.zeros(3)),
        "damaged": honest[:-3],
        "cannot reshape": honest.replace(b"(2, 3, 4)", b"(9, 9, 9)"),
        "magic": b"text",
    }
    for says, raw in cases.items():
        npz(path, raw)
        bounded(lambda: arrays_of(path, frames=ANY), says)
    npz(path, honest, "other.npy")
    bounded(lambda: arrays_of(path, frames=ANY), "no item named")
    path.write_bytes(b"PK" + bytes(50))
    bounded(lambda: arrays_of(path, frames=ANY), "damaged")


@pytest.mark.parametrize("dtype", [">f4", "<u2", "bool", "f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_numpy_and_scipy_read_them(tmp_path: Path, dtype: str, order: str) -> None:
    array = np.asarray(pixels(3, 5, 7) % 2, dtype=dtype, order=order)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", frames=array)
        assert np.array_equal(npz_array(tmp_path / "a.npz", "frames"), np.load(tmp_path / "a.npz")["frames"])
    for compressed in (True, False):
        savemat(tmp_path / "a.mat", {"x": array, "y": array[0]}, do_compression=compressed)
        found, known = matlab_arrays(tmp_path / "a.mat", ("x", "y")), loadmat(tmp_path / "a.mat")
        assert all(np.array_equal(ours, known[name]) for ours, name in zip(found, "xy", strict=True))


def test_what_the_bound_admits_is_read(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    path = tmp_path / "mnist" / IMAGES
    path.write_bytes(gzip.compress(idx(np.zeros((1000, 28, 28), np.uint8))))
    (tmp_path / "mnist" / LABELS).write_bytes(gzip.compress(idx(np.zeros(1000, np.uint8))))
    assert len(load("mnist", tmp_path).train) == 1000


@pytest.mark.filterwarnings("ignore")
def test_files_damaged_at_random_are_read_or_refused() -> None:
    from damage_files import campaign

    ends, wrong = campaign(180, 0)
    assert not wrong
    assert {name for name, end in ends if end == "refused"} >= {"idx", "SVHN", "npz", "mat", "safetensors", "runs"}
