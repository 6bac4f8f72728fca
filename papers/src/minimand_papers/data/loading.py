"""Loading a dataset into memory by name."""

import os
from pathlib import Path

from minimand.errors import DataError, OptionError, ShapeError

from .dataset import Dataset, DataSplit
from .registry import DatasetRecord, Files, registry

__all__ = ["data_directory", "load"]

# The test part of a bundled dataset does not depend on the seed of an experiment.
_TEST_SEED = 0


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory of the datasets: ``data_dir``, else the variable ``MINIMAND_DATA``, else the user's cache.

    >>> data_directory("somewhere").name
    'somewhere'
    """
    if data_dir is None:
        data_dir = os.environ.get("MINIMAND_DATA") or None
    if data_dir is None:
        from platformdirs import user_cache_dir

        data_dir = user_cache_dir("minimand")
    return Path(data_dir).expanduser().absolute()


def load(
    dataset: str | DatasetRecord,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    progress: bool = True,
) -> Dataset:
    """Load a dataset of the :data:`registry` into memory, by name.

    ``digits`` and ``mnist5k`` come inside Python packages. The others are read from :func:`data_directory`, in the
    publishers' layouts; with ``download=True`` missing files are downloaded first and checked. To download from a
    mirror, give a :class:`DatasetRecord` made by :func:`dataclasses.replace` instead of the name.

    >>> data = load("digits")
    >>> data.shape, len(data.train), len(data.test), data.classes[:3]
    ((1, 8, 8), 1438, 359, ('0', '1', '2'))
    """
    record = dataset if isinstance(dataset, DatasetRecord) else _find(dataset)
    if isinstance(record.source, Files):
        train, test = _from_files(record, record.source, data_directory(data_dir), download, progress)
    else:
        train, test = DataSplit(*record.source.read()).split(0.2, seed=_TEST_SEED)
    shape = tuple(train.images.shape[1:])
    if shape != record.shape:
        raise ShapeError(f"{record.title} has images of {shape}, its record says {record.shape}")
    complete = (len(train), len(test)) == (record.train_size, record.test_size)
    return Dataset(record.name, train, test, record.classes, complete)


def _find(name: str) -> DatasetRecord:
    try:
        return registry[name]
    except KeyError:
        raise OptionError(f"there is no dataset named {name!r}; available: {', '.join(registry)}") from None


def _from_files(
    record: DatasetRecord, source: Files, directory: Path, download: bool, progress: bool
) -> tuple[DataSplit, DataSplit]:
    """Both splits from the publisher's files."""
    if download and missing(source, directory):
        from .download import fetch

        fetch(record, source, directory, progress=progress)
    if absent := missing(source, directory):
        raise _not_there(record, source, directory, absent)
    count = len(record.classes)
    train, test = (
        DataSplit(*source.read([path for name in names if (path := locate(source, directory, name))], count))
        for names in (source.train, source.test)
    )
    return train, test


def locate(source: Files, directory: Path, name: str) -> Path | None:
    """The file of this name under the data directory, packed or not."""
    candidates = (directory / source.folder / (name + ending) for ending in source.variants)
    return next((path for path in candidates if path.is_file()), None)


def missing(source: Files, directory: Path) -> list[str]:
    """The names of the files that are not there."""
    return [name for name in (*source.train, *source.test) if locate(source, directory, name) is None]


def _not_there(record: DatasetRecord, source: Files, directory: Path, absent: list[str]) -> DataError:
    every = (*source.train, *source.test)
    what = "is missing" if len(absent) == len(every) else f"is incomplete, without {', '.join(absent)}"
    packed = " (as .gz or unpacked)" if len(source.variants) > 1 else ""
    by_hand = source.remotes[0].addresses[0] if source.archive else source.remotes[0].addresses[0].rpartition("/")[0]
    return DataError(
        f"{record.title} {what}: {directory / source.folder} should hold {', '.join(every)}{packed}; "
        f'get it by load("{record.name}", download=True), --download on the command line '
        f"({source.size / 1e6:.0f} MB), or by hand from {by_hand}, or name another directory by data_dir= "
        f"(--data-dir) or MINIMAND_DATA"
    )
