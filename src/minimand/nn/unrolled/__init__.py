"""Unrolled networks for image reconstruction, with learned transforms, steps and thresholds."""

from .admmnet import ADMMNet
from .base import PhaseResult, PhaseSetting, UnrolledNet
from .classical import CycleSpinning, smooth_tv_reconstruction, sparse_reconstruction
from .diagnose import Diagnosis, PhaseReport, diagnose
from .fistanet import FISTANet
from .istanet import ISTANet
from .langevin import Posterior, langevin
from .ridgediagnosis import RidgeDiagnosis
from .ridgenet import RidgeNet
from .ridgetraining import RidgeTrainer
from .start import least_squares_start
from .transform import Architecture, Shrinkage, Transform

__all__ = [
    "ADMMNet",
    "Architecture",
    "CycleSpinning",
    "Diagnosis",
    "FISTANet",
    "ISTANet",
    "PhaseReport",
    "PhaseResult",
    "PhaseSetting",
    "Posterior",
    "RidgeDiagnosis",
    "RidgeNet",
    "RidgeTrainer",
    "Shrinkage",
    "Transform",
    "UnrolledNet",
    "diagnose",
    "langevin",
    "least_squares_start",
    "smooth_tv_reconstruction",
    "sparse_reconstruction",
]
