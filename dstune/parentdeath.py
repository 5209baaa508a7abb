"""A child that never outlives its parent, however the parent ends."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""Linux `prctl` option: be killed when the parent dies (`include/uapi/linux/prctl.h`)."""


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
