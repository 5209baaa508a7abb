"""SuperOffload's second process, whose CPU Adam updates what the first hands over: here it is the same process.

The process has a gradient buffer of its own and the optimizer's states; its parameters are shared memory. Source:
deepspeed 0.19.8 `runtime/superoffload/superoffload_utils.py`.
"""

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

WORKER_BYTES = 850_000_000
"""Resident memory of the second process beside its tensors: an assumption, less than one with CUDA's libraries."""


class InProcessOptimizer:
    """Stands in for `SuperOffloadCPUOptimizer`: updates end at once, host memory is taken as there."""

    def __init__(
        self, optimizer_config: Any, cpuadam_cores_perc: float = 0.8, max_grad_numel: int = 1_000_000,
        pin_memory: bool = True,
    ) -> None:  # fmt: skip
        del optimizer_config, cpuadam_cores_perc
        self.max_grad_numel = max_grad_numel
        empty = torch.empty(max_grad_numel, dtype=torch.float32)
        self._gradients = get_accelerator().pin_memory(empty) if pin_memory else empty
        self._process = torch.empty(WORKER_BYTES, dtype=torch.uint8)
        self._states: dict[int, list[torch.Tensor]] = {}
        self._results: list[dict[str, Any]] = []

    def async_step(
        self,
        param_group_id: int,
        sub_group_id: int,
        fp32_param: torch.Tensor,
        fp32_grad: torch.Tensor,
        rollback: bool = False,
        lr: float | None = None,
    ) -> None:
        """Update a sub-group; the first time its two states are made."""
        del fp32_grad, lr
        if sub_group_id not in self._states:
            self._states[sub_group_id] = [torch.empty_like(fp32_param) for _ in range(2)]
        self._results.append(
            {
                "param_group_id": param_group_id,
                "sub_group_id": sub_group_id,
                "updated_param": fp32_param,
                "event_type": "rollback" if rollback else "adam_step",
            }
        )

    def get_result(self, expected_event_type: str | None = None) -> dict[str, Any] | None:
        """An update that ended, or None."""
        del expected_event_type
        return self._results.pop(0) if self._results else None

    def close(self) -> None:
        """There is no process to end."""
