"""Unrolled networks reject bad input with an error of one sentence."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from minimand.errors import CapabilityError, NonFiniteError, OptionError, ShapeError
from minimand.nn import (
    Architecture,
    FISTANet,
    ISTANet,
    RidgeNet,
    diagnose,
    least_squares_start,
    sparse_reconstruction,
)
from minimand.operators import Dense, Inpainting, SubsampledFourier, gaussian_blur, orthonormal_gaussian

SMALL = Architecture(channels=3)


def _phi() -> Tensor:
    return orthonormal_gaussian(5, 16, generator=torch.Generator().manual_seed(0))


def _net() -> ISTANet:
    return ISTANet(_phi(), 2, architecture=SMALL)


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "phi that fits no block": (lambda: ISTANet(torch.randn(3, 10)), ShapeError, "square"),
    "phi with NaN": (lambda: ISTANet(torch.full((3, 9), torch.nan)), NonFiniteError, "phi"),
    "phi that is a vector": (lambda: ISTANet(torch.rand(9)), ShapeError, "square"),
    "phi without pixels": (lambda: ISTANet(torch.rand(3, 0)), ShapeError, "square"),
    "phi of whole numbers": (lambda: ISTANet(torch.eye(4, 9).long()), CapabilityError, "real floating-point"),
    "a complex phi": (lambda: ISTANet(torch.eye(4, 9) + 0j), CapabilityError, "real floating-point"),
    "phi of zeros": (lambda: ISTANet(torch.zeros(3, 9)), OptionError, "positive and finite"),
    "phi on colours": (lambda: ISTANet(Inpainting(torch.ones(3, 4, 4))), ShapeError, r"\(1, H, W\)"),
    "phi of another kind": (lambda: ISTANet("phi"), OptionError, "measurement matrix or an operator"),
    "no phases": (lambda: ISTANet(_phi(), 0), OptionError, "phases"),
    "unknown momentum": (lambda: FISTANet(_phi(), momentum="heavy"), OptionError, "momentum"),
    "no channels": (lambda: Architecture(channels=0), OptionError, "channels"),
    "a start of another size": (lambda: ISTANet(_phi(), initial=torch.eye(3)), ShapeError, "16 × 5"),
    "a start with NaN": (lambda: ISTANet(_phi(), initial=torch.full((16, 5), torch.nan)), NonFiniteError, "initial"),
    "a start that is no tensor": (lambda: ISTANet(_phi(), initial=[1]), CapabilityError, "initial"),
    "a start for an operator": (
        lambda: ISTANet(gaussian_blur((4, 4), 0.5), initial=torch.eye(3)),
        OptionError,
        "starts from Φᵀy",
    ),
    "y of another size": (lambda: _net()(torch.rand(2, 6)), ShapeError, r"\(B, 5\)"),
    "y of another shape": (lambda: _net()(torch.rand(5)), ShapeError, r"\(B, 5\)"),
    "whole y of another size": (lambda: _net()(torch.rand(2, 6, 1, 1)), ShapeError, "5"),
    "y of another operator": (
        lambda: ISTANet(SubsampledFourier(torch.ones(4, 4)))(torch.rand(1, 2, 5, 5)),
        ShapeError,
        "2, 4, 4",
    ),
    "y in double": (lambda: _net()(torch.rand(2, 5).double()), OptionError, "float64"),
    "y with NaN": (lambda: _net()(torch.full((2, 5), torch.nan)), NonFiniteError, "y"),
    "y that is nothing": (lambda: _net()(None), CapabilityError, "y must be a tensor"),
    "y of bytes": (lambda: _net()(torch.ones(2, 5).byte()), CapabilityError, "uint8"),
    "bytes": (lambda: _net()(torch.full((2, 16), 200.0) @ _phi().mT), OptionError, "255"),
    "a target of another size": (lambda: _net().loss(torch.rand(2, 5), torch.rand(2, 9)), ShapeError, "target"),
    "a target of bytes": (
        lambda: _net().loss(torch.rand(2, 5), 200 * torch.ones(2, 16)),
        OptionError,
        r"outside \[0, 1\].*255",
    ),
    "a target with NaN": (
        lambda: _net().loss(torch.rand(2, 5), torch.full((2, 16), torch.nan)),
        NonFiniteError,
        "target",
    ),
    "half a phase": (lambda: _net().grown(3.5), OptionError, "phases"),
    "a negative blur": (lambda: gaussian_blur((4, 4), 1.0, radius=-1), OptionError, "radius"),
    "sides that do not shuffle": (
        lambda: ISTANet(_phi(), 1, architecture=Architecture(shuffle=3))(torch.rand(2, 5)),
        ShapeError,
        "multiples of 3",
    ),
    "shrinking": (lambda: _net().grown(1), OptionError, "phases must be at least 2"),
    "diagnosing another net": (lambda: diagnose(nn.Linear(2, 2), torch.rand(1, 2)), CapabilityError, "explain"),
    "no frame": (
        lambda: sparse_reconstruction(torch.rand(1, 5), Dense(_phi()), Dense(_phi()), 0.1),
        OptionError,
        "BlockDCT or a Wavelet",
    ),
    "a learned matrix": (lambda: ISTANet(nn.Parameter(_phi())), CapabilityError, "phi requires gradients"),
    "a learned operator": (lambda: RidgeNet(Dense(nn.Parameter(_phi()))), CapabilityError, "phi requires gradients"),
    "a learned start": (
        lambda: FISTANet(_phi(), initial=nn.Parameter(_phi().mT.clone())),
        CapabilityError,
        "initial requires gradients",
    ),
    "blocks of another size": (lambda: least_squares_start(_phi(), torch.rand(3, 9)), ShapeError, "columns"),
}


@pytest.mark.parametrize(("call", "error", "match"), BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore:the rows of phi")
def test_bad_input_gets_one_sentence(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)
