"""Row-wise Adagrad as a torch optimizer, for parameters that the backward pass does not update.

    sum += mean over the row of g^2;   row -= lr / (1 + (t-1)*lr_decay) * g / (sqrt(sum) + eps)

A row is a slice along the last dimension: a matrix [rows, dim] has `sum` of shape [rows], a vector has one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from tilerec.errors import ConfigError
from tilerec.ops.runtime.square_root import square_root
from tilerec.optim.sharded_state import tiled_table_of
from tilerec.spec import optimizer as spec


@final
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row, for dense and sparse (COO) gradients.

    `apply_optimizer_in_backward(RowWiseAdagrad, ...)` applies the same rule in the backward pass. A sparse gradient
    updates and decays only its rows, as an attached optimizer does. State per parameter: `step` (float32, 0-d), and
    `sum` in the parameter's dtype, at least float32.

    Args:
        params: parameters or param groups.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in `torch.optim.Adagrad`
            (weight decay is L2: `g += weight_decay * row`).

    Raises:
        ConfigError: a setting out of range, or a parameter that is a tile of a table cut by columns: means over rows
            need the other tiles, and only an attached optimizer exchanges them.
    """

    # The spec of this optimizer when it is attached; `spec.torch_optimizer.from_torch` reads it.
    optimizer_spec = spec.RowWiseAdagrad

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        settings = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for name, value in settings.items():
            if not value >= 0:
                raise ConfigError(f"RowWiseAdagrad: got {name}={value}; expected a number >= 0. Pass {name}=...")
        super().__init__(params, {**settings, "maximize": maximize})

    def _start(self, parameter: Tensor, group: dict[str, Any]) -> None:
        accum_dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.state[parameter] = {
            "step": torch.tensor(0.0),
            "sum": torch.full(
                parameter.shape[:-1],
                group["initial_accumulator_value"],
                dtype=accum_dtype,
                device=parameter.device,
            ),
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            table = tiled_table_of(parameter)
            if table is not None:  # `shape_of` raises for tiles with parts of rows
                table.shape_of([leaf.new_zeros(len(leaf)) for leaf in table.leaves()], "RowWiseAdagrad: 'sum'")
            self._start(parameter, self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch. `sum` may also have the shape [rows, 1]; its dtype stays at least float32."""
        super().load_state_dict(state_dict)
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(ids, mine, strict=True):
            loaded = state_dict["state"].get(number)
            if loaded is not None:
                accum_dtype = torch.promote_types(parameter.dtype, torch.float32)
                total = loaded["sum"].to(device=parameter.device, dtype=accum_dtype, copy=True)
                self.state[parameter]["sum"] = total.reshape(parameter.shape[:-1])

    def share_memory(self) -> None:
        """Move the state to shared memory, for training in several processes."""
        for state in self.state.values():
            state["step"].share_memory_()
            state["sum"].share_memory_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @staticmethod
    def _update(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        state["step"] += 1
        lr = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        total = state["sum"]
        rows: Any = ...
        if grad.layout is torch.sparse_coo:
            grad = grad.coalesce()
            if grad.sparse_dim() != 1 or parameter.dim() < 2:
                raise ConfigError(
                    f"RowWiseAdagrad: got a sparse gradient with {grad.sparse_dim()} sparse dimensions for a parameter "
                    f"of shape {tuple(parameter.shape)}; expected whole rows. Use a dense gradient."
                )
            rows, grad = grad.indices()[0], grad.values()
        g = grad.to(total.dtype)
        g = -g if group["maximize"] else g
        w = parameter[rows].to(total.dtype)
        if group["weight_decay"] != 0:
            g = g + group["weight_decay"] * w
        # An empty row (dim 0) has no mean and no elements to update.
        new_total = total[rows] + (g * g).sum(-1) / max(parameter.shape[-1] if parameter.dim() else 1, 1)
        total[rows] = new_total
        parameter[rows] = (w - lr * g / (square_root(new_total) + group["eps"]).unsqueeze(-1)).to(parameter.dtype)
