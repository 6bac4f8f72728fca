"""Laws: ResNet, DenseNet and DMRNet are special cases of the algorithms, to the bit; the zoo has the papers' sizes."""

import pytest
import torch
from torch import nn

from minimand.nn import HeavyBallUpdate, NesterovUpdate, OptimizationNet, Transition, coefficient_parameters
from minimand.nn.blocks import DenseUpdate, MergeUpdate, TwoStreamBlock
from minimand_papers.zoo import AGDNet, AGDNet121, DenseNet, DenseNet121, DMRNet, HBNet, HBNet34, ResNet, ResNet34


def _size(net):
    return sum(p.numel() for p in net.parameters())


def _images(count=2, side=32):
    return torch.randn(count, 3, side, side)


# ResNet -----------------------------------------------------------------------------------------------------------


def _plain_resnet(net, images, *, preactivation):
    """The forward pass of He et al., with the parameters of one of our networks."""
    x = net.stem(images)
    for block in net.trunk.blocks:
        if isinstance(block, Transition):
            small = x[:, :, ::2, ::2]
            short = torch.zeros(len(x), 2 * x.shape[1], *small.shape[2:], dtype=x.dtype)
            short[:, x.shape[1] // 2 : x.shape[1] // 2 + x.shape[1]] = small
            x = block.block(x) + short
        else:
            x = block(x) + x
        x = x if preactivation else torch.relu(x)
    return net.head(x)


@pytest.mark.parametrize("preactivation", [False, True])
@pytest.mark.parametrize("make", [ResNet, HBNet])
def test_one_and_zero_are_resnet_to_the_bit(make, preactivation):
    net, images = make(2, width=0.5, preactivation=preactivation), _images()
    for mode in (False, True):
        net.train(mode)
        torch.testing.assert_close(net(images), _plain_resnet(net, images, preactivation=preactivation), atol=0, rtol=0)


def test_hb_net_starts_with_resnets_gradients():
    plain, heavy, images = ResNet(2, width=0.5), HBNet(2, width=0.5), _images()
    missing = heavy.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all("coefficients" in key for key in missing.missing_keys)
    for net in (plain, heavy):
        net(images).square().sum().backward()
    others = dict(heavy.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, atol=1e-4, rtol=1e-4)
    assert all(row.weight.grad.abs().max() > 0 for row in heavy.trunk.coefficients)


def test_nesterov_without_momentum_is_resnet_to_the_bit():
    plain, images = ResNet(2, width=0.5), _images()
    for learnable in (False, "scalar", "channel"):
        net = ResNet(2, width=0.5, update=NesterovUpdate(0.0), learnable=learnable)
        weights = [p for p in net.parameters() if p not in set(coefficient_parameters(net))]
        with torch.no_grad():
            for ours, theirs in zip(weights, plain.parameters(), strict=True):
                ours.copy_(theirs)
        torch.testing.assert_close(net(images), plain(images), atol=0, rtol=0)
        net(images).sum().backward()
        assert all(p.grad is not None for p in net.parameters())


def test_the_second_coefficient_reaches_two_blocks_back():
    """A nonzero β₂ adds β₂ times the previous iterate, which is x at the start of a stage."""
    blocks = [nn.Linear(3, 3) for _ in range(2)]
    x = torch.randn(4, 3)
    net = OptimizationNet(blocks, HeavyBallUpdate(1.0, 0.25))
    first = blocks[0](x) + 1.25 * x
    torch.testing.assert_close(net(x), blocks[1](first) + first + 0.25 * x)


def test_momentum_starts_anew_at_a_transition():
    block, shortcut, last = nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Linear(2, 2)
    net = OptimizationNet([nn.Linear(3, 3), Transition(block, shortcut), last], HeavyBallUpdate(0.9, -0.4))
    x = torch.randn(4, 3)
    y = net.blocks[0](x) + 0.9 * x - 0.4 * x
    z = shortcut(y)
    new = block(y) + 0.9 * z - 0.4 * z
    torch.testing.assert_close(net(x), last(new) + 0.9 * new - 0.4 * z)


# DenseNet ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learnable", [False, "scalar", "channel"])
def test_alpha_one_beta_zero_is_densenet_to_the_bit(learnable):
    net, images = DenseNet(4, 13, learnable=learnable), _images()
    x = net.stem(images)
    for block in net.trunk.blocks:
        x = block.block(x) if isinstance(block, Transition) else torch.cat([x, block(x)], 1)
    torch.testing.assert_close(net(images), net.head(x), atol=0, rtol=0)


def test_a_block_on_the_concatenation_is_eq_18_with_a_block_per_source():
    """A convolution on the concatenation is the sum over j of T_{k,j}(x_j), α = 1."""
    channels = [3, 2, 2, 2]
    blocks = [nn.Conv2d(sum(channels[: k + 1]), 2, 3, padding=1).double() for k in range(3)]
    net = OptimizationNet(blocks, DenseUpdate(past=0.3))
    terms = [torch.randn(2, 3, 5, 5, dtype=torch.float64)]
    x = terms[0]
    for block in blocks:
        total = block.bias[:, None, None].expand(2, 2, 5, 5)
        for weight, term in zip(block.weight.split(channels[: len(terms)], 1), terms, strict=True):
            total = total + nn.functional.conv2d(term, weight, padding=1)
        terms.append(total + 0.3 * sum(terms[1:]) if len(terms) > 1 else total)
    torch.testing.assert_close(net(x), torch.cat(terms, 1))


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_learned_betas_of_agd_net_weight_the_iterates(kind):
    net = OptimizationNet(
        [nn.Linear(3 + 2 * k, 2).double() for k in range(4)], DenseUpdate(), learnable=kind, channels=2
    ).double()
    for row in net.coefficients:
        for parameter in row.parameters():
            nn.init.normal_(parameter)
    x = torch.randn(5, 3, dtype=torch.float64)
    terms = [x]
    for block, row in zip(net.blocks, net.coefficients, strict=True):
        new = block(torch.cat(terms, 1))
        for weight, term in zip(row(2), terms[1:], strict=True):
            new = new + weight * term
        terms.append(new)
    torch.testing.assert_close(net(x), torch.cat(terms, 1))


# DMRNet -----------------------------------------------------------------------------------------------------------


def test_halves_are_dmrnet():
    """x′ ← T′(x′) + ½(x′ + x), x ← T(x) + ½(x′ + x)."""
    first, second = ([nn.Linear(4, 4) for _ in range(3)] for _ in range(2))
    net = OptimizationNet([TwoStreamBlock(a, b) for a, b in zip(first, second, strict=True)], MergeUpdate())
    x = torch.randn(5, 4)
    left = right = x
    for a, b in zip(first, second, strict=True):
        mean = 0.5 * left + 0.5 * right
        left, right = a(left) + mean, b(right) + mean
    torch.testing.assert_close(net(x), 0.5 * (left + right), atol=0, rtol=0)


# Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "millions"), [(1, 0.08), (2, 0.17), (3, 0.27), (9, 0.85), (18, 1.73)])
def test_cifar_resnets_have_6n_plus_2_layers(n, millions):
    net = ResNet(n)
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 6 * n + 2
    widths = (16, 32, 64)
    convolutions = 27 * 16 + sum(9 * w * w * (2 * n - (w > 16)) + (9 * w * w // 2) * (w > 16) for w in widths)
    norms = 2 * 16 + sum(2 * w * 2 * n for w in widths)
    assert _size(net) == convolutions + norms + 65 * 10
    assert round(_size(net) / 1e6, 2) == millions  # He et al., 2015, Table 6, for n = 3, 9, 18
    assert _size(HBNet(n)) == _size(net) + 2 * 3 * n


def test_densenets_have_the_publications_sizes():
    assert round(_size(DenseNet(12, 40)) / 1e6, 1) == 1.0
    assert _size(AGDNet(12, 40)) == _size(DenseNet(12, 40)) + 3 * sum(range(12))
    # DenseNet-BC (k = 12, L = 100): 0.8 million.
    assert round(_size(DenseNet(12, 100, bottleneck=True)) / 1e6, 1) == 0.8


def test_imagenet_pairs_have_torchvisions_sizes():
    """Published: 21,797,672 and 7,978,856."""
    assert _size(ResNet34()) == 21_797_672
    assert _size(HBNet34()) == 21_797_672 + 2 * 16
    assert _size(DenseNet121()) == 7_978_856
    assert _size(AGDNet121()) == 7_978_856 + sum(sum(range(m)) for m in (6, 12, 24, 16))


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: HBNet34(10, width=0.25), 64),
        (lambda: AGDNet121(10, growth=8), 64),
        (lambda: AGDNet(4, 13), 32),
        (lambda: AGDNet(4, 16, bottleneck=True, dropout=0.2), 32),
        (lambda: HBNet(1, width=0.5, learnable="channel"), 32),
        (lambda: DMRNet(2, width=0.25), 32),
        (lambda: DMRNet(2, width=0.25, learnable=True, preactivation=True), 32),
    ],
    ids=["HBNet34", "AGDNet121", "AGDNet", "AGDNet-BC", "HBNet", "DMRNet", "ADMM-Net"],
)
def test_a_step_reaches_every_parameter(make, side):
    net, images = make(), _images(4, side)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    nn.functional.cross_entropy(net(images), torch.arange(4)).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    optimizer.step()
    assert torch.isfinite(net.eval()(images)).all()


@pytest.mark.parametrize("make", [ResNet34, HBNet34, DenseNet121, AGDNet121])
def test_imagenet_networks_step_at_full_size(make):
    net, images = make(), _images(2, 64)
    before = [p.detach().clone() for p in coefficient_parameters(net)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(net(images), torch.tensor([3, 999]))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    after = list(coefficient_parameters(net))
    assert len(before) == (0 if make in (ResNet34, DenseNet121) else len(after))
    assert not after or any(not torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_nesterovs_form_of_the_imagenet_resnet_is_resnet_without_momentum():
    torch.manual_seed(0)
    plain = ResNet34(10, width=0.1)
    torch.manual_seed(0)
    net = ResNet34(10, width=0.1, update=NesterovUpdate(0.0), learnable=True)
    images = _images(2, 64)
    torch.testing.assert_close(net(images), plain(images), atol=0, rtol=0)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("make", [ResNet, HBNet, DMRNet, ResNet34, HBNet34])
def test_widths_are_above_zero(make, width):
    with pytest.raises(ValueError, match="width must be a finite number > 0"):
        make(width=width)


def test_depths_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="3m"):
        DenseNet(12, 41)
    with pytest.raises(ValueError, match="growth"):
        DenseNet(0, 40)
    with pytest.raises(ValueError, match="growth"):
        DenseNet121(growth=0)
    with pytest.raises(ValueError, match="n=0"):
        ResNet(0)
