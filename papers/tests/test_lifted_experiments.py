"""Laws: the experiments of lifted training measure what they say."""

import pytest
import torch

from minimand_papers.context import Lab
from minimand_papers.experiments.lin2019 import lpom_parallel
from minimand_papers.registry import find


def test_the_experiment_gives_synchronous_processes_the_batches_of_one(tmp_path):
    options = find("lpom-parallel").presets["smoke"].options
    ends = []
    for part in (lpom_parallel.JACOBI, lpom_parallel.name("synchronous", 2)):
        torch.manual_seed(0)
        records = list(lpom_parallel.run(options, part, Lab(tmp_path / part, 0)))
        ends.append((records[0]["loss"], records[-1]["validation"], records[-1]["test"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
