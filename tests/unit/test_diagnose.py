"""What libraries, launchers and ranks say of an ending, in the words that they really use, and the name it gets."""

import pytest

from dstune.search.diagnose import Evidence, diagnose
from dstune.search.trial import Outcome

TRACEBACK = "Traceback (most recent call last):"
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41215"
NCCL_REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
    "remote process exited or there was a network error, NCCL version 2.27.5"
)


def crash(*last: str) -> list[str]:
    return ["[INFO] step 1", TRACEBACK, '  File "train.py", line 3, in <module>', *last]


@pytest.mark.parametrize(
    ("last", "outcome", "detail"),
    [
        (("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
         "GiB of which 1.01 GiB is free."), Outcome.OOM, "GPU memory ran out"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Outcome.OOM, "cuDNN could not allocate GPU memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", Outcome.OOM, "cuDNN"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Outcome.OOM,
         "cuBLAS could not allocate GPU memory"),
        ("ncclUnhandledCudaError: Call to CUDA function failed. Last error: Failed to CUDA calloc async 608 bytes",
         Outcome.OOM, "NCCL could not allocate GPU memory"),
        ("torch.distributed.DistBackendError: NCCL error: Cuda failure 2 'out of memory'", Outcome.OOM,
         "NCCL could not allocate GPU memory"),
        ("torch.AcceleratorError: CUDA error: out of memory", Outcome.OOM, "the driver had no memory left"),
        ("RuntimeError: CUDA error: out of memory in cudaHostAlloc", Outcome.OOM, "page-locked host memory ran out"),
        (("RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)"), Outcome.OOM,
         "host memory ran out"),
        ("MemoryError", Outcome.OOM, "host memory ran out"),
        ("OSError: [Errno 28] No space left on device", Outcome.CRASH, "the disk is full"),
        (("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
         "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"), Outcome.CRASH,
         "the port was taken"),
        ("deepspeed.runtime.config_utils.DeepSpeedConfigError: no batch", Outcome.INVALID, "refused the configuration"),
        ("ValueError: something of the model's own", Outcome.CRASH, "something of the model's own"),
    ],
)  # fmt: skip
def test_a_last_word_has_its_name(last: str, outcome: Outcome, detail: str) -> None:
    ending = diagnose(Evidence(statuses=[0, 1], logs={0: crash(GLOO), 1: crash(last)}))
    assert (ending.outcome, ending.rank) == (outcome, 1)
    assert detail in ending.detail
    assert ending.log_lines[-1] == last


@pytest.mark.parametrize(
    ("said", "outcome", "detail"),
    [
        ("traceback : Signal 9 (SIGKILL) received by PID 4711", Outcome.CRASH, "signal 9"),
        ("[launch.py:325:sigkill_handler] ['python', '-u'] exits with return code = -9", Outcome.CRASH, "signal 9"),
        ("exits with return code = -11", Outcome.CRASH, "signal 11"),
        ("traceback : Signal 6 (SIGABRT) received by PID 4711", Outcome.CRASH, "signal 6"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM Killed.",
         Outcome.OOM, "host memory ran out"),
    ],
)  # fmt: skip
def test_a_launcher_speaks_for_a_rank_that_cannot(said: str, outcome: Outcome, detail: str) -> None:
    ending = diagnose(Evidence(statuses=[1], logs={0: crash(GLOO), 1: ["[INFO] step 1"]}, launcher=["...", said]))
    assert ending.outcome is outcome
    assert detail in ending.detail


def test_a_launcher_does_not_outshout_a_rank_that_says_why() -> None:
    logs = {0: crash("ValueError: of the model"), 1: crash(GLOO)}
    ending = diagnose(Evidence(statuses=[1], logs=logs, launcher=["exits with return code = -9"]))
    assert (ending.detail, ending.rank) == ("ValueError: of the model", 0)


@pytest.mark.parametrize("loss", [GLOO, NCCL_REMOTE])
def test_a_rank_that_only_the_others_miss_is_named(loss: str) -> None:
    ending = diagnose(Evidence(statuses=[1], logs={0: crash(loss), 1: [], 2: crash(loss)}))
    assert (ending.outcome, ending.rank) == (Outcome.CRASH, 1)
    assert "vanished" in ending.detail


def test_a_rank_that_was_asked_to_end_does_not_hide_the_one_that_was_killed() -> None:
    ending = diagnose(Evidence(statuses=[-15, -9], logs={0: [], 1: []}))
    assert "signal 9" in ending.detail


def test_no_rank_is_blamed_when_none_is_missing() -> None:
    ending = diagnose(Evidence(statuses=[1], logs={0: crash(GLOO), 1: crash(GLOO)}))
    assert ending.rank is None


def test_the_kernel_is_believed_before_an_exit_status() -> None:
    ending = diagnose(Evidence(statuses=[-9], logs={0: []}, kernel_killed=True))
    assert (ending.outcome, ending.detail) == (Outcome.OOM, "host memory ran out: the kernel killed a process")


def test_a_lock_that_stayed_is_named_when_time_runs_out() -> None:
    ending = diagnose(Evidence(statuses=[-15], logs={0: ["waiting"]}, timed_out=True, locks=["/cache/fused_adam/lock"]))
    assert ending.outcome is Outcome.HANG
    assert "delete /cache/fused_adam/lock" in ending.detail
