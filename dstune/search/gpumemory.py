"""What the driver counts as used on each visible GPU: trials start only when the last one's memory is back."""

import time
from typing import Any

from dstune.cluster.detect import visible_handles
from dstune.units import MIB

SLACK_BYTES = 64 * MIB
"""Other processes' small change."""
TIMEOUT_S = 30.0
POLL_S = 0.1


class GpuMemory:
    """The used memory of all visible GPUs; without NVML nothing is known, and nothing waited for."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._nvml, self._handles = visible_handles()
        except Exception:  # noqa: BLE001 - no driver, no library: there is no GPU to watch
            self._handles = []
        self.baseline_bytes = self.used_bytes()

    def used_bytes(self) -> int:
        """Of all GPUs together, now."""
        return sum(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)

    def wait_until_back(self) -> int:
        """Wait until what trials took is given back; the bytes that are still missing when the time is up."""
        deadline = time.monotonic() + TIMEOUT_S
        while (held := self.used_bytes() - self.baseline_bytes) > SLACK_BYTES and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return held if held > SLACK_BYTES else 0
