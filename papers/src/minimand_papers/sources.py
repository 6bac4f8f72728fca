"""The four sources whose experiments this package runs, with the keys by which code and docs cite them."""

import dataclasses
from collections.abc import Mapping

__all__ = ["SOURCES", "Publication"]


@dataclasses.dataclass(frozen=True)
class Publication:
    """A publication.

    Args:
        folder: Its folder in ``experiments`` and its results page.
        key: The citation key in docstrings and tables.
        short: Authors and year.
        reference: The full reference.
        experiments: Names of its experiments, in the order of the source.
    """

    folder: str
    key: str
    short: str
    reference: str
    experiments: tuple[str, ...]


SOURCES: Mapping[str, Publication] = {
    source.folder: source
    for source in (
        Publication(
            "bibi2019",
            "[Bibi2019]",
            "Bibi et al. 2019",
            "A. Bibi, B. Ghanem, V. Koltun, R. Ranftl. Deep Layers as Stochastic Solvers. ICLR 2019.",
            (
                "layer-convergence",
                "solvers-lenet",
                "solvers-alexnet",
                "solvers-vgg",
                "solvers-dropout-rates",
                "solvers-heads",
                "conversion-digits",
                "dropout-digits",
                "dropout-digits-rates",
                "solvers-compare",
                "solvers-conversion",
                "solvers-uncertainty",
            ),
        ),
        Publication(
            "lin2019",
            "[Lin2019]",
            "Lin 2019",
            "Z. Lin. Optimization and Deep Neural Networks. Slides, Peking University, April 2019.",
            (
                "lpom-mnist",
                "lpom-svhn",
                "lpom-curves",
                "lifted-family",
                "lifted-activations",
                "lifted-deep-sigmoid",
                "lifted-resnet",
                "lpom-parallel",
                "lifted-conv",
                "cs-set11",
                "cs-phases",
                "mri-brain",
                "deblur",
                "superres",
                "prior-transfer",
                "structure-rates",
                "structure-depth",
                "structure-cifar",
                "structure-imagenet",
            ),
        ),
        Publication(
            "vidal2018",
            "[Vidal2018]",
            "Vidal 2018",
            "R. Vidal. Mathematics of Deep Learning. Slides, Johns Hopkins University, 2018.",
            (
                "degree-mismatch",
                "lowrank-synthetic",
                "completion",
                "nmf-faces",
                "hyperspectral-unmixing",
                "dictionary-patches",
                "rpca-video",
                "grow-relu-1d",
                "grow-relu-digits",
                "grow-alexnet",
                "jacobian-regularizer",
                "dropout-mnist",
                "dropout-factorization",
                "dropout-variable-rate",
                "dropout-landscape",
                "dropout-closed-form",
                "dropout-equalization",
            ),
        ),
        Publication(
            "frerix2018",
            "[Frerix2018]",
            "Frerix et al. 2018",
            "T. Frerix, T. Möllenhoff, M. Moeller, D. Cremers. Proximal Backpropagation. ICLR 2018.",
            ("proxprop-mlp", "proxprop-stepsizes", "proxprop-adam", "proxprop-peers", "proxprop-autoencoder"),
        ),
    )
}
"""The sources by folder, in the order in which they are listed."""
