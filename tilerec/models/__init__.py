"""Complete models: for clicks DLRM and its variants, DCN-V2, DeepFM and logistic regression; for several tasks shared
bottom, MMoE and PLE; for ranking two towers and SASRec."""

from tilerec.models.dcn import DCNv2
from tilerec.models.deepfm import FMInteractionArch, SimpleDeepFMNN
from tilerec.models.dlrm import DLRM, DLRM_DCN, DenseArch, DLRM_Projection, DLRMTrain, OverArch, SparseArch
from tilerec.models.linear import LogisticRegression
from tilerec.models.mmoe import MMoE
from tilerec.models.ple import PLE
from tilerec.models.sasrec import SASRec, SASRecOutput
from tilerec.models.sasrec_tower import SASRecTower
from tilerec.models.shared_bottom import SharedBottom
from tilerec.models.task_towers import TaskTowers
from tilerec.models.two_tower import Tower, TwoTower, TwoTowerTrainTask
from tilerec.modules.interaction import InteractionArch, InteractionDCNArch, InteractionProjectionArch

__all__ = [
    "DCNv2",
    "DLRM",
    "DLRM_DCN",
    "DLRM_Projection",
    "PLE",
    "DLRMTrain",
    "DenseArch",
    "FMInteractionArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "LogisticRegression",
    "MMoE",
    "OverArch",
    "SASRec",
    "SASRecOutput",
    "SASRecTower",
    "SharedBottom",
    "SimpleDeepFMNN",
    "SparseArch",
    "TaskTowers",
    "Tower",
    "TwoTower",
    "TwoTowerTrainTask",
]
