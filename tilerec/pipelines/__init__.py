"""Training pipelines: stages of later batches overlap with the step of the current one."""

from tilerec.pipelines.batch_in_flight import Origin
from tilerec.pipelines.compiled_pipeline import TorchCompileConfig, TrainPipelinePT2
from tilerec.pipelines.pipeline import Stage
from tilerec.pipelines.routes_ahead import RouteReport
from tilerec.pipelines.stage_times import StageTimes
from tilerec.pipelines.staged import PipelineStage, StagedTrainPipeline, StageOut
from tilerec.pipelines.trace import Trace
from tilerec.pipelines.train_pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineContext,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

__all__ = [
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
    "PrefetchTrainPipelineSparseDist",
    "EvalPipelineSparseDist",
    "TrainPipelinePT2",
    "TorchCompileConfig",
    "StagedTrainPipeline",
    "PipelineStage",
    "StageOut",
    "TrainPipelineContext",
    "Origin",
    "RouteReport",
    "Stage",
    "StageTimes",
    "Trace",
]
