"""Laws: the experiments of lifted training measure what they say."""

import copy

import pytest
import torch
from torch import nn

from minimand_papers.context import Lab
from minimand_papers.experiments.lin2019 import lpom_parallel
from minimand_papers.experiments.lin2019._control import ridge_control
from minimand_papers.registry import find


def test_the_experiment_gives_synchronous_processes_the_batches_of_one(tmp_path):
    options = find("lpom-parallel").presets["smoke"].options
    ends = []
    for part in (lpom_parallel.JACOBI, lpom_parallel.name("synchronous", 2)):
        torch.manual_seed(0)
        records = list(lpom_parallel.run(options, part, Lab(tmp_path / part, 0)))
        ends.append((records[0]["loss"], records[-1]["validation"], records[-1]["test"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_the_control_updates_running_statistics_as_one_forward_pass_does():
    torch.manual_seed(0)
    parts = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    net, x, y = nn.Sequential(*parts).double(), torch.randn(10, 2, 6, 6, dtype=torch.float64), torch.randint(3, (10,))
    twin = copy.deepcopy(net)
    twin(x)
    torch.testing.assert_close(ridge_control(net, x, y)[1].state_dict(), twin[1].state_dict())
