"""Choosing who holds what: a search, and helpers for plans by hand."""

from tilerec.planner.constraints import ParameterConstraints as ParameterConstraints
from tilerec.planner.greedy import PlannerError as PlannerError
from tilerec.planner.helpers import apply_to_all as apply_to_all
from tilerec.planner.helpers import column_wise as column_wise
from tilerec.planner.helpers import construct_module_sharding_plan as construct_module_sharding_plan
from tilerec.planner.helpers import data_parallel as data_parallel
from tilerec.planner.helpers import explicit as explicit
from tilerec.planner.helpers import grid_shard as grid_shard
from tilerec.planner.helpers import row_wise as row_wise
from tilerec.planner.helpers import table_column_wise as table_column_wise
from tilerec.planner.helpers import table_row_wise as table_row_wise
from tilerec.planner.helpers import table_wise as table_wise
from tilerec.planner.planner import EmbeddingShardingPlanner as EmbeddingShardingPlanner
from tilerec.spec.plan import EmbeddingComputeKernel as EmbeddingComputeKernel
from tilerec.spec.plan import EmbeddingModuleShardingPlan as EmbeddingModuleShardingPlan
from tilerec.spec.plan import ParameterSharding as ParameterSharding
from tilerec.spec.plan import ShardingPlan as ShardingPlan
from tilerec.spec.plan import ShardingType as ShardingType
from tilerec.spec.plan import Wire as Wire
from tilerec.spec.tile import Tile as Tile
from tilerec.spec.tile import Tiling as Tiling
from tilerec.spec.topology import Topology as Topology
