"""Optimizers: in-backward updates of tables, state by parameter name, warm-up, gradient clipping."""

from tilerec.optim.attach import apply_optimizer_in_backward as apply_optimizer_in_backward
from tilerec.optim.attach import set_sparse_grad as set_sparse_grad
from tilerec.optim.clipping import GradientClipping as GradientClipping
from tilerec.optim.clipping import GradientClippingOptimizer as GradientClippingOptimizer
from tilerec.optim.combined import CombinedOptimizer as CombinedOptimizer
from tilerec.optim.fused import FusedOptimizer as FusedOptimizer
from tilerec.optim.in_backward import in_backward_optimizer_filter as in_backward_optimizer_filter
from tilerec.optim.keyed import KeyedOptimizer as KeyedOptimizer
from tilerec.optim.norm import clip_grad_norm_ as clip_grad_norm_
from tilerec.optim.positional import PositionalOptimizer as PositionalOptimizer
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
from tilerec.optim.warmup import WarmupOptimizer as WarmupOptimizer
from tilerec.optim.warmup import WarmupPolicy as WarmupPolicy
from tilerec.optim.warmup import WarmupStage as WarmupStage
from tilerec.optim.wrapper import KeyedOptimizerWrapper as KeyedOptimizerWrapper
from tilerec.optim.wrapper import OptimizerWrapper as OptimizerWrapper
from tilerec.spec.optimizer import LAMB as LAMB
from tilerec.spec.optimizer import SGD as SGD
from tilerec.spec.optimizer import Adagrad as Adagrad
from tilerec.spec.optimizer import Adam as Adam
from tilerec.spec.optimizer import AdamW as AdamW
from tilerec.spec.optimizer import LarsSGD as LarsSGD
from tilerec.spec.optimizer import OptimizerSpec as OptimizerSpec
from tilerec.spec.optimizer import PartialRowWiseAdam as PartialRowWiseAdam
from tilerec.spec.optimizer import PartialRowWiseLAMB as PartialRowWiseLAMB
