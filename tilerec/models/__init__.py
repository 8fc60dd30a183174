"""Complete models: DLRM and its variants, DeepFM."""

from tilerec.models.deepfm import FMInteractionArch, SimpleDeepFMNN
from tilerec.models.dlrm import DLRM, DLRM_DCN, DenseArch, DLRM_Projection, DLRMTrain, OverArch, SparseArch
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
    "SimpleDeepFMNN",
    "SparseArch",
]
