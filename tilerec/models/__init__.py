"""Complete models: DLRM and its variants, DeepFM, two towers, SASRec."""

from tilerec.models.deepfm import FMInteractionArch, SimpleDeepFMNN
from tilerec.models.dlrm import DLRM, DLRM_DCN, DenseArch, DLRM_Projection, DLRMTrain, OverArch, SparseArch
from tilerec.models.sasrec import SASRec, SASRecOutput
from tilerec.models.two_tower import TwoTower, TwoTowerTrainTask
from tilerec.modules.interaction import InteractionArch, InteractionDCNArch, InteractionProjectionArch

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRM_Projection",
    "DLRMTrain",
    "DenseArch",
    "FMInteractionArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "OverArch",
    "SASRec",
    "SASRecOutput",
    "SimpleDeepFMNN",
    "SparseArch",
    "TwoTower",
    "TwoTowerTrainTask",
]
