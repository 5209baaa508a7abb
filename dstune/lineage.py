"""No process is left behind: children that die with their parent, and orphans that come back to the eldest."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""Linux `prctl` option: be killed when the parent dies (`include/uapi/linux/prctl.h`)."""
PR_SET_CHILD_SUBREAPER = 36
"""Linux `prctl` option: descendants whose parent dies become this process's children (same file)."""


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """From now on no descendant gets lost: one whose parent has died is this process's child."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
