"""Laws of the zoo: the papers' sizes, and the blocks that the papers replace convert where they say."""

import pytest
import torch

from minimand import convert
from minimand.errors import OptionError
from minimand.nn import Learning, coefficient_parameters
from minimand.solvers import ProxGD, ProxSG
from minimand_papers.zoo import VGG16, AGDNet, AlexNet, DMRNet, HBNet, LeNet


def _size(net):
    return sum(p.numel() for p in net.parameters())


def test_parameter_counts_are_the_publications():
    assert _size(LeNet()) == 62_006
    assert _size(LeNet(channels=1, size=28)) == 61_706
    assert _size(AlexNet()) == 2_472_266
    assert _size(VGG16()) == 15_245_130


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_output_of_vgg_depends_on_its_input_from_the_start(batch_norm):
    torch.manual_seed(0)
    logits = VGG16(width=0.25, batch_norm=batch_norm).eval()(torch.randn(16, 3, 32, 32))
    assert logits.std(0).mean() > 1e-3


@pytest.mark.parametrize(
    ("net", "rules", "taus"),
    [
        (LeNet(), {"classifier.[14]": ProxSG(iters=2)}, {"classifier.1": 0.5, "classifier.4": 0.5}),
        (LeNet(dropout=(0.0, 0.9)), {"classifier.4": ProxSG(iters=2)}, {"classifier.4": pytest.approx(0.1)}),
        (AlexNet(width=0.1), {"features.0": ProxGD(iters=2)}, {}),
        (VGG16(width=0.05), {"classifier.[14]": ProxSG(iters=2)}, {"classifier.1": 0.5, "classifier.4": 0.5}),
        (VGG16(width=0.05, batch_norm=True), {"features.*": ProxGD(iters=2)}, {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_papers_blocks_convert(net, rules, taus):
    images = torch.randn(4, 3, 32, 32)
    converted = convert(net, rules)
    for path, tau in taus.items():
        assert converted.get_submodule(path).solver.tau == tau
    converted(images).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_images_that_are_too_small_are_refused():
    with pytest.raises(OptionError, match="16"):
        LeNet(size=8)


@pytest.mark.parametrize(
    "make",
    [
        lambda how: HBNet(2, width=0.25, learnable=how),
        lambda how: HBNet(2, width=0.25, start=(1.0, -0.1), learnable=how),
        lambda how: DMRNet(2, width=0.25, learnable=how),
        lambda how: AGDNet(4, 13, start=-0.1, learnable=how),
    ],
    ids=["HBNet", "HBNet with momentum", "DMRNet", "AGDNet"],
)
def test_networks_of_the_zoo_keep_signs(make):
    net = make(Learning("scalar", "positive"))
    net(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in coefficient_parameters(net))
    for row in net.trunk.coefficients:
        if row.start:
            torch.testing.assert_close(row.weight.detach(), torch.tensor(row.start))


def test_zeros_alone_have_no_sign():
    with pytest.raises(OptionError, match="starts at 0 and has no sign"):
        AGDNet(4, 10, learnable=Learning("scalar", "positive"))
