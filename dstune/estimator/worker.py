"""The child process: imports torch, DeepSpeed and transformers once, then forks for each job.

Reads jobs as JSON lines on standard input (`{"number", "job", "answer_path"}`), writes `{"number", "status"}` on its
own copy of standard output when a fork has ended; the answer lies in `answer_path`. Whatever libraries print goes to
standard error. Ends, with all forks, when standard input closes.

A fork isolates DeepSpeed's global state and the patches of torch. The parent never runs an operation, so there are no
threads to lose.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from dstune.atomicfile import write_whole
from dstune.lineage import die_with_parent
from dstune.units import KIB

LATE_IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
    "transformers.masking_utils",
)
"""What DeepSpeed and torch import when they are used: better here, once, than in each fork."""
POLL_S = 0.05
"""How often ended forks are looked for."""


def main() -> int:
    """Serve until standard input closes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    accelerator = _import_everything()
    print(json.dumps({"ready": True}), file=out)
    _serve(out, accelerator)
    return 0


def _import_everything() -> Any:
    """The virtual accelerator must stand before DeepSpeed's modules look for one."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch._dynamo  # noqa: F401, PLC0415 - must come before `_make_subclass` is replaced
    import transformers  # noqa: F401, PLC0415

    from dstune.estimator import device  # noqa: PLC0415

    device.register()
    import deepspeed.accelerator as ds_accelerator  # noqa: PLC0415

    from dstune.estimator.accelerator import VirtualAccelerator  # noqa: PLC0415

    accelerator = VirtualAccelerator()
    ds_accelerator.set_accelerator(accelerator)
    from dstune.estimator import patches, runtime  # noqa: F401, PLC0415 - imports deepspeed itself

    for name in (*LATE_IMPORTS, *(patch.target.partition(":")[0] for patch in patches.PATCHES)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return accelerator


def _serve(out: TextIO, accelerator: Any) -> None:
    running: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    pending = b""
    while True:
        if selector.select(POLL_S if running else None):
            chunk = os.read(0, 1 << 20)
            if not chunk:
                _stop(running)
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                running[_fork(request, accelerator)] = request["number"]
        _reap(running, out)


def _fork(request: dict[str, Any], accelerator: Any) -> int:
    from dstune.estimator.job import Job  # noqa: PLC0415
    from dstune.model.build import preload  # noqa: PLC0415

    job = Job.model_validate(request["job"])
    preload(job.model)
    gc.freeze()  # a fork's collections need not look through what the imports made
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _answer(job, Path(request["answer_path"]), accelerator)
    os._exit(0)  # destructors of fake tensors must not run without their mode


def _reap(running: dict[int, int], out: TextIO) -> None:
    with contextlib.suppress(ChildProcessError):
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = running.pop(pid)
            print(json.dumps({"number": number, "status": os.waitstatus_to_exitcode(status)}), file=out)


def _stop(running: dict[int, int]) -> None:
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _answer(job: Any, path: Path, accelerator: Any) -> None:
    """Run the job and leave its answer; a fault is an answer too."""
    from dstune.estimator import runtime  # noqa: PLC0415
    from dstune.estimator.failure import failure_from  # noqa: PLC0415
    from dstune.estimator.job import Answer  # noqa: PLC0415

    def report(error: BaseException) -> None:
        _write(path, Answer(failure=failure_from(error)))
        os._exit(0)

    try:
        answer, tape = runtime.run(job, accelerator, report)
        if job.tape_path is not None:
            tape.save(Path(job.tape_path))
        answer = answer.model_copy(update=_closing(job, answer, tape))
    except BaseException as error:  # noqa: BLE001 - the border of the process
        traceback.print_exc()
        answer = Answer(failure=failure_from(error))
    _write(path, answer)


def _closing(job: Any, answer: Any, tape: Any) -> dict[str, Any]:
    """What an answer is completed with when the run has ended."""
    from dstune.estimator.assessment import assess_gpu, assess_host  # noqa: PLC0415

    found: dict[str, Any] = {}
    if job.cluster is not None:
        found["gpu"] = assess_gpu(job.plan, job.cluster, tape)
        found["host"] = assess_host(job.cluster, tape, answer.disk_bytes)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {**found, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_rss_bytes": usage.ru_maxrss * KIB}


def _write(path: Path, answer: Any) -> None:
    write_whole(path, answer.model_dump_json(round_trip=True))


if __name__ == "__main__":
    sys.exit(main())
