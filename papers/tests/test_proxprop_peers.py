"""Law: the experiment's Muon equals torch's, except that torch orthogonalises in bfloat16."""

import pytest
import torch
from torch import nn

pytest.importorskip("tyro")

from minimand_papers.experiments.frerix2018.proxprop_peers import Muon


def test_muon_is_torchs_up_to_its_precision():
    torch.manual_seed(0)
    start = [torch.randn(9, 5), torch.randn(4, 12)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    mine, reference = Muon(ours, 0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, t in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.02 * (a - t).norm()
