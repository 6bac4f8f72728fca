"""Damage files of every format at random bytes and read them: every reading ends in a result or in one sentence.

    python papers/tests/damage_files.py --files 10000 --seed 0

The last line says how many files were read and how many ended in another exception; these are the exit status.
"""

import argparse
import collections
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from minimand.errors import MinimandError
from minimand_papers.context import Lab
from minimand_papers.data import load, load_images
from minimand_papers.experiments.vidal2018._factor import arrays_of
from minimand_papers.registry import find
from minimand_papers.report.sections import sections
from minimand_papers.runner import RunSetting, run
from test_data import pixels, write_cifar, write_idx, write_svhn

FILE = str(Path(__file__).parent / "cases" / "experiment_file.py")
SMALL = find(FILE).presets["smoke"].options.__class__(epochs=1, limit=40)


def readings(root: Path) -> dict[str, tuple[list[Path], Callable[[], object]]]:
    """For each format, whole files and how they are read."""
    write_idx(root / "mnist")
    write_svhn(root)
    write_cifar(root, "cifar10", 2)
    folder = root / "images" / "all"
    folder.mkdir(parents=True)
    for ending in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        Image.fromarray(pixels(20, 20)).save(folder / f"a.{ending}")
    np.savez_compressed(root / "a.npz", frames=pixels(3, 4, 5))
    savemat(root / "a.mat", {"frames": pixels(3, 4, 5)}, do_compression=True)
    directory = run(RunSetting(FILE, "smoke", SMALL, (0,), root / "runs", jobs=1)).parent
    (directory / "seed-0" / "second" / "done.json").unlink()
    part, any_shape = directory / "seed-0" / "second", (None, None, None)
    like = Lab(part, 0).kept("first", "model")

    def resumed() -> None:
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(root / "runs", copy, dirs_exist_ok=True)
            run(RunSetting(FILE, "smoke", SMALL, (0,), Path(copy), jobs=1, resume=True))

    return {
        "idx": ([*(root / "mnist").iterdir()], lambda: load("mnist", root)),
        "CIFAR": ([*(root / "cifar-10-batches-bin").iterdir()], lambda: load("cifar10", root)),
        "SVHN": ([*(root / "svhn").iterdir()], lambda: load("svhn", root)),
        "images": ([*folder.iterdir()], lambda: load_images("all", root)),
        "npz": ([root / "a.npz"], lambda: arrays_of(root / "a.npz", frames=any_shape)),
        "mat": ([root / "a.mat"], lambda: arrays_of(root / "a.mat", frames=any_shape)),
        "safetensors": (
            [directory / "seed-0" / "first" / "model.safetensors"],
            lambda: Lab(part, 0).kept("first", "model", like),
        ),
        "results": ([directory / "result.json"], lambda: sections(root / "runs", own=[find(FILE)])),
        "runs": ([part / "checkpoint.pt", part / "metrics.jsonl", directory / "protocol.json"], resumed),
    }


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """The same bytes with one to four of them changed, or pieces of them removed or added."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(len(changed), 200) if rng.random() < 0.4 else len(changed)) if changed else 0
        match rng.choice(("change", "change", "change", "remove", "add")):
            case "change":
                changed[place : place + 1] = bytes([rng.choice((0, 255, rng.randrange(256)))])
            case "remove":
                del changed[place : place + rng.randint(1, 50)]
            case "add":
                changed[place:place] = rng.randbytes(rng.randint(1, 20))
    return bytes(changed)


def campaign(files: int, seed: int) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """How so many damaged files ended, and what else was raised than a sentence."""
    rng, ends, wrong = random.Random(seed), collections.Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        formats = readings(Path(folder))
        for number in range(files):
            name = [*formats][number % len(formats)]
            paths, read = formats[name]
            path = rng.choice(sorted(paths))
            whole = path.read_bytes()
            path.write_bytes(damaged(whole, rng))
            try:
                read()
                ends[name, "read"] += 1
            except MinimandError as error:
                ends[name, "refused"] += 1
                if "\n" in str(error):
                    wrong.append(f"{name}, {path.name}: more than a sentence: {error}")
            except Exception as error:
                wrong.append(f"{name}, {path.name}: {error!r}")
            path.write_bytes(whole)
    return ends, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ends, wrong = campaign(given.files, given.seed)
    for (name, end), count in sorted(ends.items()):
        print(f"{name:12} {end:8} {count:6}")
    for line in wrong:
        print("WRONG", line)
    print(f"{given.files} damaged files, {len(wrong)} ended in neither a result nor a sentence")
    raise SystemExit(min(len(wrong), 125))


if __name__ == "__main__":
    main()
