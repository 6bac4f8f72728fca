"""Seeded splits, augmentation, and batches that resume and shard to the same numbers."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.errors import OptionError, ShapeError
from minimand_papers.data import (
    CropFlip,
    DataSplit,
    Normalization,
    batches,
    registry,
)

# Splits


def numbered(count: int, classes: int = 3, size: int = 6) -> DataSplit:
    """Images whose pixels tell their number."""
    images = torch.randint(256, (count, 3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(count) % 256, torch.arange(count) // 256
    return DataSplit(images, torch.arange(count) * 7919 % classes)


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


# Normalization and augmentation


def test_normalization_is_mean_zero_and_variance_one() -> None:
    split = numbered(100)
    x = Normalization.of(split)(split.images).double()
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5)


def test_normalization_inverts() -> None:
    split = numbered(20)
    normalize = Normalization.of(split)
    assert torch.allclose(normalize.inverse(normalize(split.images)), split.images / 255, atol=1e-6)


def test_a_constant_channel_stays_finite_and_bad_fits_are_refused() -> None:
    black = DataSplit(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(Normalization.of(black)(black.images), torch.zeros(4, 1, 2, 2))
    with pytest.raises(ShapeError, match="1 channels does not fit"):
        Normalization.of(black)(torch.zeros(4, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(OptionError, match="> 0"):
        Normalization((0.5,), (0.0,))
    with pytest.raises(ShapeError, match="without images"):
        Normalization.of(black.subset(torch.zeros(0, dtype=torch.int64)))


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
    draw = augment.draw(torch.arange(count), 0, generator)
    got = augment.apply(images, draw)
    assert got.shape == images.shape
    for image, row, out in zip(images, draw.tolist(), got, strict=True):
        top, left, mirror = row
        padded = torch.nn.functional.pad(image.flip(-1) if mirror else image, (padding,) * 4)
        assert torch.equal(out, padded[:, top : top + height, left : left + width])
    assert torch.equal(images, before)


def test_every_crop_and_mirror_occurs() -> None:
    draw = CropFlip(2).draw(torch.arange(5000), 0, torch.Generator().manual_seed(0))
    counts = torch.unique(draw, dim=0, return_counts=True)[1]
    assert len(counts) == 50
    assert 50 < int(counts.min()) <= int(counts.max()) < 160
    assert not CropFlip(2, flip=False).draw(torch.arange(100), 0, torch.Generator())[:, 2].any()
    with pytest.raises(ShapeError, match="does not fit 3 images"):
        CropFlip().apply(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), draw)
    with pytest.raises(OptionError, match="padding"):
        CropFlip(-1)


@pytest.mark.parametrize("flip", [False, True])
def test_reflected_crops_are_those_of_a_reflected_image(flip: bool) -> None:
    images = torch.randint(256, (6, 3, 7, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augment = CropFlip(3, flip, reflect=True)
    draw = augment.draw(torch.arange(6), 0, torch.Generator().manual_seed(1))
    for image, (top, left, mirror), out in zip(images, draw.tolist(), augment.apply(images, draw), strict=True):
        padded = torch.nn.functional.pad((image.flip(-1) if mirror else image).float(), (3,) * 4, mode="reflect")
        assert torch.equal(out.float(), padded[:, top : top + 7, left : left + 9])
    with pytest.raises(ShapeError, match="larger images"):
        CropFlip(7, reflect=True).apply(images, draw)


def test_alternating_mirrors_show_every_image_both_ways_in_two_epochs() -> None:
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 1, 1, 2).clone()
    images[..., 1] += 100
    split = DataSplit(images, torch.arange(40))
    loader = batches(split, 8, generator=seeded(), augment=CropFlip(0, alternate=True))
    epochs = []
    for number in range(4):
        shown = {}
        for position, (shapes, labels) in enumerate(loader):
            shown |= {
                int(label): bool(shape[0, 0, 0] > shape[0, 0, 1]) for shape, label in zip(shapes, labels, strict=True)
            }
            if number == 1 and position == 2:  # an epoch goes on, and counts on, where another loader was
                other = batches(split, 8, generator=seeded(9), augment=CropFlip(0, alternate=True))
                other.load_state_dict(loader.state_dict())
        epochs.append(shown)
    assert 5 < sum(epochs[0].values()) < 35
    assert epochs[2:] == epochs[:2]
    assert all(epochs[0][label] != epochs[1][label] for label in range(40))
    rest = {
        int(label): bool(shape[0, 0, 0] > shape[0, 0, 1]) for pair in other for shape, label in zip(*pair, strict=True)
    }
    assert len(rest) == 16
    assert all(epochs[1][label] == way for label, way in rest.items())
    following = {int(label): bool(s[0, 0, 0] > s[0, 0, 1]) for pair in other for s, label in zip(*pair, strict=True)}
    assert following == epochs[2]


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
        return batches(split, 32, generator=seeded(seed), augment=CropFlip(2), normalize=Normalization.of(split))

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
    options = {"augment": CropFlip(2), "normalize": Normalization.of(split)}
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
        assert record.license
        if hasattr(record.source, "remotes"):
            assert all(len(remote.md5) == 32 and remote.addresses for remote in record.source.remotes)
    assert dataclasses.replace(registry["mnist"], name="mine").title == "MNIST"
